"""The status page in a browser: a learn seen, promoted and undone by its buttons."""

import pathlib
import shutil

import httpx
import pytest
from server import served, service

from riftco.serve.http.auth import Keys
from riftco.serve.http.page import ASSETS

CHAT = {"messages": [{"role": "user", "content": "Where is the key?"}], "max_tokens": 4, "temperature": 0}
LEARN = {"learn": {"lora_id": "live", "lr": 1e-2, "reply": "On the hook."}}


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    found = next((p for n in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(n))), None)
    with playwright.sync_playwright() as driver:
        if found is None and not pathlib.Path(driver.chromium.executable_path).exists():
            pytest.skip("no browser: apt-get install chromium, or playwright install chromium")
        chromium = driver.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def page(browser):
    tab = browser.new_page(viewport={"width": 1100, "height": 900})
    tab.set_default_timeout(15_000)
    tab.problems = []
    tab.on("pageerror", lambda error: tab.problems.append(str(error)))
    tab.on("console", lambda said: tab.problems.append(said.text) if said.type == "error" else None)
    yield tab
    tab.close()


def test_a_learn_is_seen_promoted_and_undone(page, tokenizer, tmp_path):
    made = service(tokenizer, tmp_path)
    with served(made, train_dir=tmp_path) as url, httpx.Client(base_url=url, timeout=60) as client:
        page.goto(url)
        page.get_by_text("Nothing has been learned yet").wait_for()
        promote, undo = page.get_by_role("button", name="Promote"), page.get_by_role("button", name="Undo")
        assert promote.is_disabled() and undo.is_disabled()
        for _ in range(3):
            client.post("/v1/chat/completions", json={**CHAT, **LEARN})
        page.locator("#chart circle").nth(2).wait_for()
        losses = [line["loss_before"] for line in client.get("/learn/log").json()["data"][1:]]
        shown = page.locator("#log tbody tr").filter(has_text="learned").locator(".loss").all_inner_texts()
        assert shown == [f"{loss:.3f}" for loss in reversed(losses)]
        heights = [float(c.get_attribute("cy")) for c in page.locator("#chart circle").all()]
        assert heights == sorted(heights) and losses == sorted(losses, reverse=True), "the curve falls as the loss does"
        page.locator("#learned", has_text="3").wait_for()  # asked before the log was, perhaps before the last learn
        promote.click()
        page.locator(".version", has_text="version 2").wait_for()
        assert made.engine.bank.of("live").version == 2 and promote.is_disabled()
        undo.click()
        page.locator(".detail", has_text="step 2 ").wait_for()
        assert made.engine.learner.pupils["live"].step == 2
        page.locator("#log tbody tr").first.filter(has_text="undid 1").wait_for()
        page.get_by_label("Roll live back to a version").select_option("1")
        page.locator(".version", has_text="version 3").wait_for()
        assert made.engine.bank.of("live").digests[2] == made.engine.bank.of("live").digests[0]
        page.get_by_label("serves everyone").check()
        page.get_by_text("live now serves every request").wait_for()
        assert made.scales == {"live": 1.0}
        client.post("/v1/chat/completions", json={**CHAT, "id_slot": 1})
        page.locator(".card", has_text="Slot 1").filter(has_text="live v3").wait_for()
    page.locator("#link", has_text="no connection").wait_for()
    assert [p for p in page.problems if "ERR_CONNECTION" not in p] == []


def test_a_training_job_is_seen_and_cancelled(page, tokenizer, tmp_path):
    made = service(tokenizer, tmp_path)
    with served(made, train_dir=tmp_path) as url:
        page.goto(url)
        httpx.post(f"{url}/train", json={"lora_id": "live", "lr": 1e-3, "records": [{"text": "a b c"}], "epochs": 1000})
        job = page.locator(".jobs .card", has_text="Training live")
        job.filter(has_text="loss").wait_for()
        job.get_by_role("button", name="Cancel").click()
        page.get_by_text("The job was cancelled").wait_for()
        job.wait_for(state="detached")
    assert made.scheduler.totals.learned < 1000


def test_keys_are_asked_for_and_kept_in_memory(page, tokenizer, tmp_path):
    made = service(tokenizer, tmp_path)
    made.engine.study([], adapter="live", lr=1e-3)
    with served(made, train_dir=tmp_path, keys=Keys("user", "root")) as url:
        page.goto(url)
        page.locator("#given").fill("wrong")
        page.get_by_role("button", name="Use key").click()
        page.locator("#link", has_text="needs a key").wait_for()
        page.locator("#given").fill("user")
        page.get_by_role("button", name="Use key").click()
        page.locator("#link", has_text="live").wait_for()
        page.get_by_text("The log needs the admin").wait_for()
        page.get_by_role("button", name="Key", exact=True).click()
        page.locator("#given").fill("root")
        page.get_by_role("button", name="Use key").click()
        page.get_by_text("The log needs the admin").wait_for(state="hidden")
        page.get_by_text("created").wait_for()
        kept = page.evaluate("[localStorage.length, sessionStorage.length, document.cookie, location.href]")
        assert kept == [0, 0, "", f"{url}/"]
    assert not any("Content Security" in problem for problem in page.problems)


def test_what_the_page_may_do(tokenizer):
    with served(service(tokenizer), keys=Keys("user")) as url:
        for path in ASSETS:
            answer = httpx.get(f"{url}{path}")
            assert answer.status_code == 200, "static, and without a key"
            rules = dict(rule.strip().split(" ", 1) for rule in answer.headers["content-security-policy"].split(";"))
            assert rules["default-src"] == "'none'" and rules["script-src"] == "'self'" == rules["connect-src"]
            assert answer.headers["x-content-type-options"] == "nosniff"
            for word in ("http://", "https://", "innerHTML", "eval("):
                assert word not in answer.text.replace("http://www.w3.org/2000/svg", ""), "nothing from elsewhere"
        assert httpx.get(f"{url}/ui/../props").status_code == 401
        assert httpx.get(f"{url}/ui/other.js").status_code == 401


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_schemes_can_be_read(browser, tokenizer, scheme):
    """Text against its card: WCAG's contrast of 4.5."""
    tab = browser.new_page(color_scheme=scheme)
    with served(service(tokenizer)) as url:
        tab.goto(url)
        tab.get_by_text("This server does not learn").wait_for()
        contrasts = tab.evaluate(
            """() => {
              const lum = (c) => { const [r, g, b] = c.match(/[\\d.]+/g).slice(0, 3).map((v) => v / 255)
                .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
                return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
              const ground = (e) => { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor;
                if (!c.startsWith("rgba(0, 0, 0, 0")) return c; } return "rgb(255, 255, 255)"; };
              return ["#rate", ".tile span", ".small.rows", "h2", ".pill.live", ".pill.state", "#key", "#frozen"]
                .map((at) => document.querySelector(at)).map((e) => {
                  const [a, b] = [lum(getComputedStyle(e).color), lum(ground(e))].sort((x, y) => y - x);
                  return (a + 0.05) / (b + 0.05); }); }"""
        )
    tab.close()
    assert min(contrasts) >= 4.5, contrasts
