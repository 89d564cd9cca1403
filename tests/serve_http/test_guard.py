"""Who is let in, from where, and with how much; TLS."""

import asyncio
import json
import shutil
import ssl
import subprocess

import httpx
import pytest
from server import served, service

from riftco.serve.http import create_app
from riftco.serve.http.auth import LOOPBACK, Keys
from riftco.serve.http.run import tls_options


@pytest.fixture
def made(tokenizer):
    return service(tokenizer)


def error(answer, status):
    assert answer.status_code == status, answer.text
    return answer.json()["error"]


@pytest.mark.parametrize("path", ["/tokenize", "/v1/messages"])
def test_a_body_is_counted_as_it_comes(tokenizer, path):
    with served(service(tokenizer), largest=1000) as url:
        chunks = (b'{"content": "' if i == 0 else b"x" * 100 for i in range(50))  # of no announced length
        answer = httpx.post(f"{url}{path}", content=chunks, headers={"content-type": "application/json"})
        said = error(answer, 413)
        assert "at most 1000 bytes" in said["message"] and answer.headers["x-should-retry"] == "false"
        assert said["type"] == ("request_too_large" if path == "/v1/messages" else "invalid_request_error")
        assert httpx.post(f"{url}/tokenize", json={"content": "x"}).status_code == 200


def test_pages_of_other_sites(tokenizer):
    """A page may not use a server that trusts this machine, by a form, a script, or a name of its own for it."""
    erase = "/slots/0?action=erase"
    with served(service(tokenizer), hosts=LOOPBACK) as url, httpx.Client(base_url=url) as client:
        assert error(client.post(erase, headers={"origin": "https://evil.example"}), 403)["code"] == "origin"
        assert error(client.post(erase, headers={"origin": "null"}), 403)
        assert client.post(erase, headers={"origin": url}).status_code == 200, "its own page"
        assert client.post(erase).status_code == 200, "no page at all"
        assert error(client.get("/props", headers={"host": "evil.example:80"}), 403)["code"] == "host"
        assert error(client.get("/props", headers={"host": "[::1"}), 403)
        assert client.get("/props", headers={"host": "localhost"}).status_code == 200
        seen = client.get("/health", headers={"origin": "https://a.example"}).headers
        assert "access-control-allow-origin" not in seen
        plain = client.post("/tokenize", content='{"content": "x"}', headers={"content-type": "text/plain"})
        refused = error(plain, 400)  # what a form of another site can send is no JSON
        assert "content-type: application/json" in refused["message"]


def test_cors_by_option(tokenizer):
    site = "https://a.example"
    with served(service(tokenizer), origins=[site], keys=Keys("k")) as url, httpx.Client(base_url=url) as client:
        asks = {"origin": site, "access-control-request-method": "POST", "access-control-request-headers": "x-api-key"}
        preflight = client.options("/v1/chat/completions", headers=asks)
        assert preflight.status_code == 200 and preflight.headers["access-control-allow-origin"] == site
        answer = client.post("/tokenize", json={"content": "x"}, headers={"origin": site, "x-api-key": "k"})
        assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == site
        refused = client.get("/props", headers={"origin": site})
        assert error(refused, 401) and refused.headers["access-control-allow-origin"] == site
        assert refused.headers["www-authenticate"] == "Bearer"
        elsewhere = {"origin": "https://b.example", "x-api-key": "k"}
        other = client.post("/tokenize", json={"content": "x"}, headers=elsewhere)
        assert error(other, 403) and "access-control-allow-origin" not in other.headers


def test_a_bug_is_said_in_the_dialect(tokenizer, monkeypatch):
    made = service(tokenizer)
    monkeypatch.setattr(made, "prompt_of", lambda *a: 1 / 0)
    app = create_app(made)

    async def ask(path):
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            return await client.post(path, json={"messages": [{"role": "user", "content": "x"}], "max_tokens": 1})

    answer = asyncio.run(ask("/v1/messages"))
    assert answer.status_code == 500 and answer.json()["error"]["type"] == "api_error"
    assert answer.headers["x-should-retry"] == "false"
    assert asyncio.run(ask("/v1/chat/completions")).json()["error"]["type"] == "server_error"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not installed")
    folder = tmp_path_factory.mktemp("tls")
    made = ["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost",
            "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", folder / "key", "-out", folder / "cert"]  # fmt: skip
    subprocess.run([openssl, *made], check=True, capture_output=True)
    return folder


def test_tls(made, certificate):
    options = tls_options(str(certificate / "key"), str(certificate / "cert"))
    with served(made, config=options) as url:
        url = url.replace("http:", "https:")
        trusts = ssl.create_default_context(cafile=certificate / "cert")
        assert httpx.get(f"{url}/health", verify=trusts).json() == {"status": "ok"}
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            httpx.get(f"{url}/health")


def test_tls_asks_for_the_callers_certificate(made, certificate):
    options = tls_options(str(certificate / "key"), str(certificate / "cert"), None, str(certificate / "cert"))
    assert options["ssl_cert_reqs"] == ssl.CERT_REQUIRED
    with served(made, config=options) as url:
        trusts = ssl.create_default_context(cafile=certificate / "cert")
        with pytest.raises((httpx.ReadError, httpx.RemoteProtocolError, httpx.ConnectError, ssl.SSLError)):
            httpx.get(f"{url.replace('http:', 'https:')}/health", verify=trusts)
        trusts.load_cert_chain(certificate / "cert", certificate / "key")
        assert httpx.get(f"{url.replace('http:', 'https:')}/health", verify=trusts).status_code == 200


def test_tls_options_that_do_not_fit(certificate):
    assert tls_options(None, None) == {}
    with pytest.raises(ValueError, match="needs --ssl-certfile"):
        tls_options(str(certificate / "key"), None)
    with pytest.raises(FileNotFoundError, match="absent"):
        tls_options(str(certificate / "key"), "absent")


def test_deep_and_odd_json(made):
    with served(made) as url, httpx.Client(base_url=url, headers={"content-type": "application/json"}) as client:
        odd = (b"[" * 100_000, b"\xff\xfe", b"", b"null", b'"x"', b'{"content": "\\ud800"}', json.dumps([1]).encode())
        for body in odd:
            answer = client.post("/tokenize", content=body)
            assert error(answer, 400)["type"] == "invalid_request_error", body[:20]
