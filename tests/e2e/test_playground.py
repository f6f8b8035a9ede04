"""The pages in a real browser without internet: a key, a stream, a schema, a call, a worker killed while it answers.

What no model can be made to say is put into the page as the gateway would send it (`BrowserPage.say`).
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from hashlib import sha256

import httpx
import jsonschema
import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.support.select import Select
from selenium.webdriver.support.wait import WebDriverWait

from services.cli.stack.default_model import TINY_MODEL
from services.gateway.http.playground import PLAYGROUND
from services.gateway.tenants.keys import digest_of
from tests.adapters import write_adapter
from tests.e2e.page import BrowserPage
from tests.programs import program
from tests.stack import RunningStack, running_stack

pytestmark = pytest.mark.needs("chromium", "chromedriver")
KEY = "a-key"
LONG = {"type": "array", "items": {"type": "string", "maxLength": 40}, "minItems": 40, "maxItems": 40}
HARMFUL = """Look: <script>window.harmed = 1</script> <img src=x onerror="window.harmed = 2"> &lt;b&gt;

<iframe src="javascript:window.harmed=3"></iframe>
<svg onload="window.harmed = 4"><style>* { display: none }</style></svg>

[one](javascript:window.harmed=5) [two](JaVaScRiPt:window.harmed=6 "t") <javascript:window.harmed=7>
[three](data:text/html,<script>window.harmed=8</script>) [four](vbscript:x) [five](&#106;avascript:window.harmed=9)
![picture](https://127.0.0.1/tracked.png) ![inner](data:image/png;base64,AAAA) [good](https://example.org/a?b=c&d="e")

| a<script>window.harmed = 10</script> | b |
|:-:|--|
| <img src=x onerror=window.harmed=11> | `<script>` |

```html"><img src=x onerror=window.harmed=12>
</code></pre><script>window.harmed = 13</script>
```
```html
<img src=x onerror="window.harmed = 14">
```
"""
HARMLESS_TAGS = {
    *("p", "a", "br", "code", "pre", "div", "button", "span"),
    *("table", "thead", "tbody", "tr", "th", "td"),
}
HARMLESS_ATTRIBUTES = {"class", "href", "target", "rel", "type", "style", "aria-label", "data-language"}
LONG_ANSWER = """# A title

Some **bold** and *soft* words,
a second line, `code` and ~~none~~.

1. one
2. two
   - inner

> said

```python
def f(x):
    return "<b>" + x  # why
```

| a | b |
|---|--:|
| 1 | 2 |

---

[link]: https://example.org/
the end [text](https://example.org/x) <mailto:a@example.org>
"""
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
        folder, adapter = tmp_path_factory.mktemp("run"), tmp_path_factory.mktemp("adapter")
        write_adapter(TINY_MODEL, adapter, {"q_proj": 4, "v_proj": 4, "o_proj": 4, "up_proj": 4})
        options = ("--workers", "2", "--tensor-parallel", "1", "--adapter", f"a-pirate={adapter}")
        with running_stack(folder, *options) as running:
            running.wait_serving(2)
            yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    options.binary_location = program("chromium")
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
    browser = webdriver.Chrome(options, Service(program("chromedriver")))
    yield browser
    browser.quit()


@pytest.fixture
def page(browser: webdriver.Chrome, stack: RunningStack) -> Iterator[BrowserPage]:
    page = BrowserPage(browser, stack.url)
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


def test_wrong_key_shows_the_error_of_the_api(browser: webdriver.Chrome, stack: RunningStack) -> None:
    page = BrowserPage(browser, stack.url)
    assert "An API key is needed" in page.find("#model-error").text
    page.use_key("wrong")
    page.ask("Hello?")
    shown_error = page.find(".turn.assistant:last-of-type .error").text
    assert shown_error.startswith("401")
    assert '"code": "invalid_api_key"' in shown_error
    assert page.announced() == ""
    assert browser.execute_script("return [localStorage.length, Object.keys(sessionStorage)]") == [0, ["key"]]


def test_a_chat_streams_and_says_how_fast(page: BrowserPage) -> None:
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


def test_an_adapter_is_a_model_to_choose_after_all_bases(page: BrowserPage) -> None:
    page.set("max_tokens", 20)
    page.set("temperature", 0)
    of_base, models = page.ask("Where is it?"), Select(page.find("#model"))
    assert [option.text for option in models.options] == [TINY_MODEL.name, f"a-pirate (adapter of {TINY_MODEL.name})"]
    models.select_by_value("a-pirate")
    page.find("#new").click()
    assert page.ask("Where is it?") != of_base


def test_sleeping_model_is_marked_in_the_list(page: BrowserPage) -> None:
    page.list_models(awake="serving", asleep="sleeping")
    page.use_key(KEY)
    page.find("#model option[value=asleep]")
    assert [option.text for option in Select(page.find("#model")).options] == ["awake", "asleep (sleeps)"]


def test_json_schema_gives_conforming_json(page: BrowserPage) -> None:
    page.find("#schema-example").click()
    value = json.loads(page.ask("A thing"))
    schema = json.loads(page.find("#schema").get_property("value"))
    jsonschema.validate(value, schema)
    assert "valid JSON" in page.facts()
    page.set("schema", "{")
    page.send("A thing")
    assert page.find("#schema[aria-invalid=true]")
    assert "JSON" in page.find("#schema-error").text


def test_a_call_is_shown_and_its_result_goes_on(page: BrowserPage) -> None:
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


def test_a_killed_worker_is_noted_and_the_text_goes_on(page: BrowserPage, stack: RunningStack) -> None:
    page.find("input[value=completion] + span").click()
    for field, value in {"max_tokens": 700, "temperature": 0.8, "seed": 7, "schema": json.dumps(LONG)}.items():
        page.set(field, value)
    undisturbed = page.ask("import os\n")
    assert not page.browser.find_elements(By.CSS_SELECTOR, ".takeover")
    page.find("#new").click()
    begun = stack.first_tokens()
    page.send("import os\n")
    # By the gateway's word: where cores are scarce, a page that draws tokens says nothing until it has drawn them all.
    stack.wait_first_token(begun)
    stack.wait_busy(1)
    victim = stack.busiest()
    os.kill(stack.pid_of(victim), signal.SIGKILL)
    assert page.answer() == undisturbed
    note = page.find(".takeover").text
    assert note.startswith(f"{victim} was lost after ")
    assert note.endswith("goes on, token for token.")
    assert victim not in page.facts()
    assert page.find(".seam")


def test_harmful_answer_is_shown_inert(page: BrowserPage, stack: RunningStack) -> None:
    page.say(HARMFUL)
    reported = page.end_saying()
    assert page.browser.execute_script("return window.harmed") is None
    made = page.browser.execute_script("""return [...document.querySelectorAll('.markdown *')].map(node => [
        node.localName, node.getAttributeNames(), node.getAttribute('href')])""")
    names, attributes, addresses = zip(*made, strict=True)
    assert set(names) <= HARMLESS_TAGS
    assert set().union(*attributes) <= HARMLESS_ATTRIBUTES
    followed = {address for address in addresses if address}
    assert followed == {"https://127.0.0.1/tracked.png", "https://example.org/a?b=c&d=%22e%22"}
    for text in (
        "<script>window.harmed = 1</script>",
        "<iframe src=",
        "[one](javascript:",
        "<b>",
        "</code></pre><script>",
    ):
        assert text in reported
    loaded = page.browser.execute_script("return performance.getEntriesByType('resource').map(entry => entry.name)")
    assert all(address.startswith(stack.url) for address in loaded), loaded


def test_markdown_grows_in_place(page: BrowserPage) -> None:
    """Piece by piece it becomes what it is at once; what is finished keeps its nodes, and its reader their place."""
    page.say(LONG_ANSWER)
    page.end_saying()
    whole = page.html()
    for tag in ("h3", "strong", "em", "s", "ol>li>ul>li", "blockquote>p", "th", "hr", "p>code", "pre .hljs-keyword"):
        assert page.find(f".markdown {tag}")
    assert [link.get_attribute("href") for link in page.browser.find_elements(By.CSS_SELECTOR, ".markdown a")] == [
        "https://example.org/x", "mailto:a@example.org"
    ]  # fmt: skip
    page.find("#new").click()
    page.say("")
    for at in range(0, len(LONG_ANSWER), 9):
        page.say_more(LONG_ANSWER[at : at + 9])
        if at == 90:
            page.browser.execute_script("window.title = document.querySelector('.markdown h3')")
    assert page.html() == whole
    assert page.browser.execute_script("return window.title === document.querySelector('.markdown h3')")
    page.say_more("\n\n```\n" + "line\n" * 60)
    at_end = "const log = document.getElementById('log'); return log.scrollHeight - log.scrollTop - log.clientHeight"
    assert page.browser.execute_script(at_end) < 2, "who is at the end follows it"
    page.browser.execute_script("""document.getElementById('log').scrollTop = 40;
        window.block = document.querySelector('.code-block:last-child')""")
    page.say_more("line\n" * 20 + "x" * 400)
    page.end_saying()
    assert page.browser.execute_script("return document.getElementById('log').scrollTop") == 40
    assert page.browser.execute_script("return window.block === document.querySelector('.code-block:last-child')")


def test_code_is_copied_and_a_seam_stands_where_the_other_worker_went_on(page: BrowserPage) -> None:
    page.browser.execute_cdp_cmd(
        "Browser.grantPermissions", {"permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"]}
    )
    page.say("First a *word*, then ")
    page.say_more("**another** one.\n\n```sh\nls -l\n", "worker-1")
    page.say_more("cat <file>\n```\n", "worker-2")
    page.end_saying()
    before = """return [...document.querySelectorAll('.seam')].map(seam => {
        const range = new Range(); range.setStartBefore(seam.closest('p, code')); range.setEndBefore(seam);
        return range.toString()})"""
    assert page.browser.execute_script(before) == ["First a word, then", "ls -l"]
    page.find(".copy").click()
    page.find(".copy.copied")
    assert page.browser.execute_async_script("navigator.clipboard.readText().then(arguments[0])") == "ls -l\ncat <file>"


def test_vendored_libraries_match_their_listed_hashes() -> None:
    rows = re.findall(
        r"^\| `([^`]+)` .* `([0-9a-f]{64})` \|$", (PLAYGROUND / "vendor/README.md").read_text(), re.MULTILINE
    )
    held = {path.name for path in (PLAYGROUND / "vendor").iterdir() if "js" in path.suffix}
    assert {name for name, _ in rows} == held
    for name, digest in rows:
        assert sha256((PLAYGROUND / "vendor" / name).read_bytes()).hexdigest() == digest, name


def test_playground_works_below_a_path_and_serves_only_its_own_files(stack: RunningStack) -> None:
    with httpx.Client(base_url=stack.url, timeout=60) as client:
        page = client.get("/")
        assert "script-src 'self'" in page.headers["content-security-policy"]
        assert "'unsafe" not in page.headers["content-security-policy"]
        for linked in (page, client.get("/docs")):
            assert not [link for link in linked.text.split('"') if link.startswith(("/", "http:", "https:"))]
        assert (
            client.get("/playground/page.js").headers["content-type"].startswith(("text/javascript", "application/j"))
        )
        library = client.get("/playground/vendor/markdown-it.esm.min.mjs")
        assert library.headers["content-type"].startswith(("text/javascript", "application/j"))
        named_paths = (
            "/../settings.py",
            "/%2e%2e/settings.py",
            "/vendor/../../settings.py",
            "/vendor/%2e%2e/%2e%2e/settings.py",
        )
        for path in (*named_paths, "", "/x.js", "/vendor"):
            assert client.get(f"/playground{path}").status_code == 404
