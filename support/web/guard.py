"""Who may use the page or the API: whoever sits at this machine; anybody else needs the token.

Every request passes here first. A name of the host that is not ours is refused, which is what DNS rebinding would
bring; so is a request that another site's page has sent (Origin, Sec-Fetch-Site), and a changing one without JSON's
content type, which no form of another site can send. The token, where there is one, comes as `Authorization: Bearer`; a
page also takes it once in the address (`?token=`), from where it goes into a cookie that scripts cannot read.
Sources: OWASP cheat sheets on cross-site request forgery and on content security policy.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Callable, Iterable
from urllib.parse import parse_qsl, urlencode, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

COOKIE = "frugalt5_token"
CHANGING = ("POST", "PUT", "PATCH", "DELETE")
BODY_TYPES = ("application/json", "application/octet-stream")
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "font-src 'self'; manifest-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


WITHOUT_TOKEN = (
    "This page needs the token that was printed when it was started: open it as http://HOST:PORT/?token=...\n"
    "本页需要启动时打印的令牌：请以 http://HOST:PORT/?token=... 打开。"
)


class Guard:
    """Lets a request through, or answers it.

    Args:
        token: empty: none is needed. hosts: names of this machine beside the loopback's and plain addresses.
        is_page: whether a browser opens it, which brings the token in the address and then in a cookie.
        open_paths: need no token. refuse: what a refusal looks like, of code and text.
    """

    def __init__(
        self,
        app: ASGIApp,
        token: str = "",
        hosts: Iterable[str] = (),
        is_page: bool = True,
        open_paths: Iterable[str] = (),
        refuse: Callable[[int, str], Response] = lambda code, text: PlainTextResponse(text, code),
    ) -> None:
        self._app = app
        self._token = token
        self._is_page = is_page
        self._refuse = refuse
        self._hosts = {*LOOPBACK_NAMES, *map(str.lower, hosts)}
        self._open_paths = {*open_paths}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        if scope["type"] != "http":
            await self._app(scope, receive, send)
        else:
            await (self._answer(scope) or self._app)(scope, receive, sending)

    def _answer(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        if not self._is_ours(headers.get("host", "")):
            return self._refuse(421, "this is not the name of this machine")
        if not _is_same_site(headers, scope["method"]):
            return self._refuse(403, "requests of other sites are refused")
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if scope["method"] in CHANGING and kind not in BODY_TYPES:
            return self._refuse(415, "send application/json")
        is_open = not self._token or scope["path"] in self._open_paths
        return None if is_open else self._ask_for_token(scope, headers)

    def _is_ours(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname
            if name in self._hosts:
                return True
            ipaddress.ip_address(str(name))  # No foreign name resolves to an address that is written out.
        except ValueError:
            return False
        return bool(self._token)  # Bound to the loopback, only its own addresses are meant.

    def _ask_for_token(self, scope: Scope, headers: Headers) -> Response | None:
        client = scope["client"][0]
        port = scope["server"][1]
        # What a browser keeps instead of the token: it sends its cookies to every server of this host, whatever the
        # port, and nobody else can use it from another address. Two pages of one host would take each other's cookie,
        # but for its name.
        cookie = f"{COOKIE}_{port}"
        credential = hmac.new(self._token.encode("utf8"), f"{client} {port}".encode(), "sha256").hexdigest()
        cookies = cookie_parser(headers.get("cookie", ""))
        query = dict(parse_qsl(scope["query_string"].decode("latin1")))
        word, _, key = headers.get("authorization", "").partition(" ")
        if self._is_page and scope["method"] == "GET" and "token" in query:
            if not _is_equal(query.pop("token"), self._token):
                return self._refuse(401, "wrong token")
            # A path that begins with two slashes, or slash and backslash, would lead to another site.
            path = "/" + scope["path"].lstrip("/\\")
            moved = RedirectResponse(f"{path}?{urlencode(query)}".removesuffix("?"), 303)
            moved.set_cookie(cookie, credential, httponly=True, samesite="strict", max_age=30 * 86400)
            return moved
        if word.lower() == "bearer":
            is_known = _is_equal(key.strip(), self._token)
        else:
            is_known = self._is_page and _is_equal(cookies.get(cookie, ""), credential)
        if is_known:
            return None
        refused = self._refuse(401, WITHOUT_TOKEN if self._is_page else "send the key: Authorization: Bearer KEY")
        refused.headers["WWW-Authenticate"] = "Bearer"
        return refused


def _is_equal(word: str, secret: str) -> bool:
    return hmac.compare_digest(word.encode("utf8", "replace"), secret.encode("utf8"))


def _is_same_site(headers: Headers, method: str) -> bool:
    """Whether a request comes from this page, from no page at all, or merely opens it from a link."""
    origin = headers.get("origin")
    if origin is not None:
        host = headers.get("host", "").lower()
        return origin.lower() in (f"http://{host}", f"https://{host}")
    site = headers.get("sec-fetch-site", "none")
    is_opened = method == "GET" and headers.get("sec-fetch-mode") == "navigate"
    return is_opened or site in ("none", "same-origin")
