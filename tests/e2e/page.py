"""The playground as a user sees it, in a browser."""

from __future__ import annotations

from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.wait import WebDriverWait

# The next chat's answer: pieces that the test gives one by one, and a worker that takes over in between.
SAY = """
const sent = new TransformStream(), writer = sent.writable.getWriter(), fetched = window.fetch;
const event = (value) => writer.write(new TextEncoder().encode("data: " + value + "\\n\\n"));
window.fetch = async (address, options) => {
  if (!String(address).endsWith("v1/chat/completions")) return fetched(address, options);
  window.fetch = fetched;
  return new Response(sent.readable);
};
window.say = (content, worker) => event(JSON.stringify({choices: [{delta: {content}, worker}]}));
window.endSaying = () => event("[DONE]");
"""

# The list of models is that of the test.
LIST = """
const list = JSON.stringify({data: arguments[0]}), fetched = window.fetch;
window.fetch = async (address, options) =>
  String(address).endsWith("v1/models") ? new Response(list) : fetched(address, options);
"""


class BrowserPage:
    """The page as a user sees and uses it."""

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

    def list_models(self, **phases: str) -> None:
        """Have the gateway list these models, once the key changes."""
        listed = [{"id": name, "phase": phase} for name, phase in phases.items()]
        self.browser.execute_script(LIST, listed)

    def say(self, text: str) -> None:
        """Ask in a chat that the test answers, and answer the beginning."""
        self.browser.execute_script(SAY)
        self.send("Hello?")
        self.find(".assistant.running")
        self.browser.execute_script("say(arguments[0], {id: 'worker-0'})", text)

    def say_more(self, text: str, worker: str | None = None) -> None:
        """Give another piece, perhaps of another worker, and wait until the page has drawn it."""
        drawn = "requestAnimationFrame(() => setTimeout(arguments[2]))"
        say = f"say(arguments[0], arguments[1] && {{id: arguments[1], after: 'stall'}}); {drawn}"
        self.browser.execute_async_script(say, text, worker)

    def end_saying(self) -> str:
        self.browser.execute_script("endSaying()")
        return self.answer()

    def html(self) -> str:
        return str(self.browser.execute_script("return document.querySelector('.markdown').innerHTML"))

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

    def announced(self) -> str:
        """The last text of the screen reader, which is not visible."""
        return str(self.find("#status").get_property("textContent"))

    def facts(self) -> str:
        return self.browser.find_elements(By.CSS_SELECTOR, ".facts")[-1].text
