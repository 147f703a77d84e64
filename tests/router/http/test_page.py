"""The page at / streams a chat and draws its timeline; it brings nothing from elsewhere."""

import re
import shutil

import pytest

from tests.router.http.tools import face
from tests.router.tools import Bench, says

CHROMIUM = shutil.which("chromium")


async def test_the_page_is_whole_and_loads_nothing_from_elsewhere() -> None:
    async with face() as it:
        page = await it.get("/")
        assert page.headers["content-type"].startswith("text/html")
        assert "default-src 'none'" in page.headers["content-security-policy"]
        named = re.findall(r'(?:src|href)="([^"]+)"', page.text)
        assert named == ["/page/page.css", "/page/page.js"]
        for path in named:
            part = await it.get(path)
            assert part.status_code == 200
            assert "://" not in part.text
            assert "innerHTML" not in part.text


async def test_status_is_there_for_it() -> None:
    async with face() as it:
        status = (await it.get("/status")).json()
        assert [worker["role"] for worker in status["workers"]] == ["prefill", "decode"]


@pytest.mark.skipif(CHROMIUM is None, reason="ran WITHOUT A BROWSER: install Debian's chromium to test the page in one")
async def test_a_chat_streams_in_a_browser_with_its_timeline_and_pools() -> None:
    from playwright.async_api import async_playwright, expect

    async with face(Bench(script=says("<think>\nhm\n</think>\n\nhi <b>wörld</b>"))) as it, async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            page = await browser.new_page()
            errors: list[str] = []
            page.on("pageerror", lambda error: errors.append(str(error)))
            await page.goto(it.url)
            await expect(page.locator("#model")).to_have_text("bytes")
            await page.fill("#text", "hello")
            await page.click("#send")
            answer = page.locator("#messages .assistant")
            await expect(answer.locator(".content")).to_have_text("hi <b>wörld</b>")
            await expect(answer.locator(".reasoning")).to_have_text("hm")
            await expect(page.locator("#timeline span")).to_have_count(4)
            await expect(page.locator("#legend")).to_contain_text("first token after")
            await expect(page.locator(".worker.served")).to_have_count(2)
            await page.click("#anew")
            await expect(page.locator("#messages li")).to_have_count(0)
            assert errors == []
        finally:
            await browser.close()
