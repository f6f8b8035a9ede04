"""The pages in a real browser without internet: a key, a stream, a schema, a call, a worker killed while it answers."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator

import httpx
import jsonschema
import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.select import Select
from selenium.webdriver.support.wait import WebDriverWait

from services.gateway.tenants.keys import digest_of
from tests.stack import RunningStack, running_stack

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs Debian's chromium and chromium-driver")
KEY = "a-key"
LONG = {"type": "array", "items": {"type": "string", "maxLength": 40}, "minItems": 40, "maxItems": 40}
CALL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 9}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    with pytest.MonkeyPatch.context() as environment:
        tenants = [{"key_sha256": digest_of(KEY), "name": "us"}]
        environment.setenv("RYZANSTEIN_TENANCY", "true")
        environment.setenv("RYZANSTEIN_API_KEYS", json.dumps(tenants))
        folder = tmp_path_factory.mktemp("run")
        with running_stack(folder, "--workers", "2", "--tensor-parallel", "1") as running:
            yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM or ""
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--window-size=1200,900",
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",  # no internet
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options, Service(DRIVER))
    yield browser
    browser.quit()


class Page:
    """What a user sees and does."""

    def __init__(self, browser: webdriver.Chrome, url: str) -> None:
        self.browser = browser
        self._wait = WebDriverWait(browser, 60, poll_frequency=0.02)
        browser.get(f"{url}/")

    def find(self, css: str) -> WebElement:
        return self._wait.until(lambda browser: browser.find_element(By.CSS_SELECTOR, css))

    def set(self, field: str, value: object) -> None:
        element = self.find(f"#{field}")
        element.clear()
        element.send_keys(str(value))

    def use_key(self, key: str) -> None:
        self.set("key", key)
        self.find("#system").click()  # leaves the field

    def send(self, text: str) -> None:
        self.set("prompt", text)
        self.find("#send").click()

    def ask(self, text: str) -> str:
        """Send, and wait for the end of the answer."""
        self.send(text)
        return self.answer()

    def told(self) -> str:
        """The text of the last answer so far."""
        script = (
            "return [...document.querySelectorAll('.assistant:last-of-type .told')].map(e => e.textContent).join('')"
        )
        return str(self.browser.execute_script(script))

    def answer(self) -> str:
        self._wait.until(lambda _: self.browser.find_elements(By.CSS_SELECTOR, ".assistant"))
        self._wait.until_not(lambda _: self.browser.find_elements(By.CSS_SELECTOR, ".running"))
        return self.told()

    def wait_told(self, characters: int) -> None:
        self._wait.until(lambda _: len(self.told()) >= characters)

    def announced(self) -> str:
        """What a screen reader says last; it is not seen."""
        return str(self.find("#status").get_property("textContent"))

    def facts(self) -> str:
        return self.browser.find_elements(By.CSS_SELECTOR, ".facts")[-1].text


@pytest.fixture
def page(browser: webdriver.Chrome, stack: RunningStack) -> Iterator[Page]:
    page = Page(browser, stack.url)
    page.use_key(KEY)
    page.find("#model option:not([value])")
    yield page
    # The network's are the models that were asked for while there was no key.
    logged = [entry for entry in browser.get_log("browser") if entry["source"] != "network"]
    assert not logged, "no script failed, and no policy was broken"


@pytest.mark.parametrize(("path", "shown"), [("/", "#welcome"), ("/docs", ".opblock"), ("/docs/", ".opblock")])
def test_every_page_is_whole_without_internet(
    browser: webdriver.Chrome, stack: RunningStack, path: str, shown: str
) -> None:
    browser.get(f"{stack.url}{path}")
    WebDriverWait(browser, 60, poll_frequency=0.02).until(lambda _: browser.find_elements(By.CSS_SELECTOR, shown))
    loaded = browser.execute_script("return performance.getEntriesByType('resource').map(entry => entry.name)")
    assert loaded
    assert all(address.startswith(stack.url) for address in loaded), loaded
    missing = [entry for entry in browser.get_log("browser") if "/v1/models" not in entry["message"]]
    assert not missing, "nothing was refused by the page's policy or not found; models need a key"


def test_a_wrong_key_shows_what_the_api_says(browser: webdriver.Chrome, stack: RunningStack) -> None:
    page = Page(browser, stack.url)
    assert "An API key is needed" in page.find("#model-error").text
    page.use_key("wrong")
    page.ask("Hello?")
    said = page.find(".turn.assistant:last-of-type .error").text
    assert said.startswith("401")
    assert '"code": "invalid_api_key"' in said
    assert page.announced() == ""
    assert browser.execute_script("return [localStorage.length, Object.keys(sessionStorage)]") == [0, ["key"]]


def test_a_chat_streams_and_says_how_fast(page: Page) -> None:
    page.set("max_tokens", 60)
    page.set("temperature", 0)
    first = page.ask("What does os.path.join do?")
    facts = page.facts()
    assert "worker-" in facts
    assert "first token" in facts
    assert "tokens/s" in facts
    page.find("#new").click()
    assert page.ask("What does os.path.join do?") == first
    assert page.ask("And os.path.split?") != first  # the conversation so far is part of the prompt


def test_a_schema_gives_json_that_follows_it(page: Page) -> None:
    page.find("#schema-example").click()
    value = json.loads(page.ask("A thing"))
    schema = json.loads(page.find("#schema").get_property("value"))
    jsonschema.validate(value, schema)
    assert "valid JSON" in page.facts()
    page.set("schema", "{")
    page.send("A thing")
    assert page.find("#schema[aria-invalid=true]")
    assert "JSON" in page.find("#schema-error").text


def test_a_call_is_shown_and_its_result_goes_on(page: Page) -> None:
    page.set("tools", json.dumps([CALL]))
    Select(page.find("#tool_choice")).select_by_visible_text("required")
    page.ask("How warm is it in Rome?")
    assert page.announced() == "The model calls get_weather: type what it returns."
    card = page.find(".call")
    assert card.find_element(By.CSS_SELECTOR, "h3").text == "get_weather"
    jsonschema.validate(json.loads(card.find_element(By.CSS_SELECTOR, "pre").text), CALL["function"]["parameters"])
    Select(page.find("#tool_choice")).select_by_visible_text("none")
    for form in page.browser.find_elements(By.CSS_SELECTOR, ".call form"):
        form.find_element(By.CSS_SELECTOR, "textarea").send_keys("21 degrees")
        form.find_element(By.CSS_SELECTOR, "button").click()
    page.find(".assistant:nth-of-type(3)")
    page.answer()
    assert not page.browser.find_elements(By.CSS_SELECTOR, ".error")
    assert page.announced().startswith("Answer complete, ")


def test_a_killed_worker_is_noted_and_the_text_goes_on(page: Page, stack: RunningStack) -> None:
    page.find("input[value=completion] + span").click()
    for field, value in {"max_tokens": 500, "temperature": 0.8, "seed": 7, "schema": json.dumps(LONG)}.items():
        page.set(field, value)
    undisturbed = page.ask("import os\n")
    assert not page.browser.find_elements(By.CSS_SELECTOR, ".takeover")
    page.find("#new").click()
    page.send("import os\n")
    page.wait_told(100)
    victim = page.facts().split()[0]
    os.kill(stack.pid_of(victim), signal.SIGKILL)
    assert page.answer() == undisturbed
    note = page.find(".takeover").text
    assert note.startswith(f"{victim} was lost after ")
    assert note.endswith("goes on, token for token.")
    assert victim not in page.facts()
    assert page.find(".seam")


def test_it_works_below_a_path_and_only_its_own_files_are_served(stack: RunningStack) -> None:
    with httpx.Client(base_url=stack.url) as client:
        page = client.get("/")
        assert "script-src 'self'" in page.headers["content-security-policy"]
        assert "'unsafe" not in page.headers["content-security-policy"]
        for linked in (page, client.get("/docs")):
            assert not [link for link in linked.text.split('"') if link.startswith(("/", "http:", "https:"))]
        assert (
            client.get("/playground/page.js").headers["content-type"].startswith(("text/javascript", "application/j"))
        )
        for path in ("/playground/../settings.py", "/playground/%2e%2e/settings.py", "/playground", "/playground/x.js"):
            assert client.get(path).status_code == 404
