"""What `riftco serve` refuses before it loads anything."""

import pytest

pytest.importorskip("fastapi", reason="riftco[serve] is not installed")

REFUSED = {
    "lets other machines in, and there is no key": ["--host", "0.0.0.0"],
    "TLS needs --ssl-certfile": ["--ssl-keyfile", "key.pem"],
    "absent.pem: no such file": ["--ssl-certfile", "absent.pem"],
}


@pytest.mark.parametrize("why", REFUSED)
def test_refusals(riftco, why):
    said = riftco("serve", "--model", "absent", *REFUSED[why], code=2)
    assert why in said.stderr
