"""The web application: from a request to a page, by the declared table.

Each request goes one way: who is it, may it, is it ours (CSRF), then the page's coroutine, then its
template. What fails is a sentence with its cure; an unexpected error is logged and shown as such.
Headers let a browser load nothing that is not served here, and run nothing that stands in a page.
"""

import contextlib
import hmac
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, urlencode

import jinja2
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sluicemq import __version__
from sluicemq.client.aio.sluice import Sluice
from sluicemq.client.tasks import Tasks
from sluicemq.clock import SYSTEM_CLOCK, Clock
from sluicemq.console import shown
from sluicemq.console.accounts import Accounts, Role
from sluicemq.console.audit import Audit
from sluicemq.console.context import Answer, Cached, Context, Page
from sluicemq.console.history import History
from sluicemq.console.sentences import LANGUAGES, language_of, noted, translator
from sluicemq.console.sessions import Credentials, Session, Sessions, Throttle
from sluicemq.errors import (
    ClientError,
    ConfigurationError,
    FilterError,
    GroupNotFoundError,
    MessageNotFoundError,
    PermissionDeniedError,
    RouteNotFoundError,
    SluiceError,
    TopicNotFoundError,
)
from sluicemq.numbers import natural

log = logging.getLogger("sluicemq.console")

HERE: Final = Path(__file__).parent
SIGN_IN: Final = "/sign-in"
FORM_BYTES_MAX: Final = 6 << 20
"""A message of RocketMQ's largest size, as a form writes it."""
THEMES: Final = ("auto", "light", "dark")
CHOICES: Final = {"language": LANGUAGES, "theme": THEMES}
YEAR_S: Final = 365 * 86_400
HEADERS: Final = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
        "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
}
_STATUS: Final[dict[type[SluiceError], int]] = {
    TopicNotFoundError: 404, GroupNotFoundError: 404, MessageNotFoundError: 404,
    RouteNotFoundError: 404, PermissionDeniedError: 403, ConfigurationError: 400,
    FilterError: 400, ClientError: 502, SluiceError: 502,
}  # fmt: skip

Connect = Callable[[Credentials | None], Sluice]


class Console:
    """What all requests share. `connect` makes a client that signs with credentials (None: with
    those of the console itself). `is_open`: without accounts, who has the link is admin."""

    def __init__(
        self,
        connect: Connect,
        accounts: Accounts,
        *,
        audit: Audit | None = None,
        is_read_only: bool = False,
        pipelines: tuple[str, ...] = (),
        proxies: tuple[str, ...] = (),
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.accounts, self.is_read_only, self.clock = accounts, is_read_only, clock
        self.audit = audit or Audit(clock)
        self.sessions, self.throttle = Sessions(clock), Throttle(clock)
        self.cached, self.history = Cached(clock), History(clock)
        self.connect, self.pipelines, self.proxies = connect, pipelines, proxies
        self._clients: dict[Credentials | None, Sluice] = {}
        self._templates = made_templates()

    def client(self, credentials: Credentials | None) -> Sluice:
        """One a pair of credentials, made when it is needed."""
        if credentials not in self._clients:
            self._clients[credentials] = self.connect(credentials)
        return self._clients[credentials]

    async def close(self) -> None:
        """Closes all connections and the audit log."""
        for client in self._clients.values():
            await client.close()
        self.audit.close()

    @contextlib.asynccontextmanager
    async def living(self, _app: Starlette) -> AsyncIterator[None]:
        """Looks at the cluster while it serves."""
        tasks = Tasks()
        admin = self.client(None).admin
        tasks.supervise(lambda: self.history.run(admin), "console history")
        try:
            yield
        finally:
            await tasks.close()
            await self.close()

    def app(self, pages: tuple[Page, ...], entries: Sequence[Route]) -> Starlette:
        """The application that serves pages to who came in by one of the entries."""
        self.pages = pages
        static = Mount("/static", StaticFiles(directory=HERE / "static"))
        routes = [
            Route(page.path, endpoint_of(self, page), methods=[page.method]) for page in pages
        ]
        return Starlette(
            routes=[static, *entries, *routes],
            middleware=[Middleware(Headers)],
            exception_handlers={HTTPException: self.not_found, Exception: self.unexpected},
            lifespan=self.living,
        )

    # ------------------------------------------------------------------------ who it is

    def session(self, request: Request) -> Session | None:
        """Who asks; of an account of the console what its file says now."""
        token = request.cookies.get(cookie_name(request), "")
        session = self.sessions.find(token, renews=not is_live_part(request))
        if session is not None and session.is_local:
            account = self.accounts.all().get(session.account)
            is_same = account is not None and account.hash == session.secret_hash
            return replace(session, role=account.role) if account and is_same else None
        return session

    # ---------------------------------------------------------------------------- answers

    def render(
        self, request: Request, template: str, status: int = 200, **values: Any
    ) -> HTMLResponse:
        """A page; or of a page its live part, when that is what was asked for."""
        language = chosen(request, "language") or language_of(
            request.headers.get("accept-language", "")
        )
        is_live = is_live_part(request)
        session: Session | None = values.setdefault("session", None)
        text = self._templates.get_template(template).render(
            layout="live.html" if is_live else "layout.html",
            t=translator(language),
            language=language,
            languages=LANGUAGES,
            theme=chosen(request, "theme") or THEMES[0],
            themes=THEMES,
            pages=[
                page for page in self.pages if page.entry and session and session.role >= page.role
            ],
            here=path_of(request),
            notice=noted(request.query_params.get("done", "")),
            query=dict(request.query_params),
            with_query=lambda **changes: with_query(request, changes),
            version=__version__,
            is_read_only=self.is_read_only,
            may={
                role.name.lower(): not self.is_read_only
                and role <= (session.role if session else 0)
                for role in Role
            },
            **values,
        )
        return HTMLResponse(text, status, {"cache-control": "no-store"})

    def refuse(
        self, request: Request, status: int, sentence: str, session: Session | None = None
    ) -> Response:
        """A page that says in a sentence of the table why not."""
        return self.render(request, "error.html", status, sentence=sentence, session=session)

    def failed(self, request: Request, error: SluiceError, session: Session | None) -> Response:
        """A page with the error's sentence and cure."""
        status = next(_STATUS[kind] for kind in type(error).__mro__ if kind in _STATUS)
        fact = error.fact
        return self.render(request, "error.html", status, fact=fact, fix=error.fix, session=session)

    async def not_found(self, request: Request, error: Exception) -> Response:
        """No page has that address."""
        status = error.status_code if isinstance(error, HTTPException) else 500
        return self.refuse(request, status, "error.not_found", self.session(request))

    async def unexpected(self, request: Request, error: Exception) -> Response:
        """An error of ours: logged."""
        log.error("%s %s", request.method, request.url.path, exc_info=error)
        return self.refuse(request, 500, "error.unexpected", self.session(request))


# -------------------------------------------------------------------------------- requests


def endpoint_of(console: Console, page: Page) -> Callable[[Request], Any]:
    """The one way of all requests for a page."""

    async def endpoint(request: Request) -> Response:
        if preference := preferred(request):
            return preference
        session = console.session(request)
        if session is None:
            return to_sign_in(request)
        if session.role < page.role or (page.event and console.is_read_only):
            why = "error.read_only" if console.is_read_only else "error.role"
            return console.refuse(request, 403, why, session)
        form: dict[str, str] = {}
        if page.event:
            read = await read_form(request)
            if read is None or not is_ours(request, session, read):
                return console.refuse(request, 403, "error.form", session)
            form = read
        context = Context(
            console.client(session.credentials), session, console.cached, console.history,
            console.clock, {name: str(text) for name, text in request.path_params.items()},
            dict(request.query_params), form, is_live_part(request),
            console.pipelines, console.proxies,
        )  # fmt: skip
        try:
            answer = await noted_answer(console, page, context, request)
        except SluiceError as error:
            return console.failed(request, error, session)
        if answer.redirect:
            return RedirectResponse(answer.redirect, 303)
        return console.render(
            request, page.template, answer.status, session=session, **answer.values
        )

    return endpoint


async def noted_answer(console: Console, page: Page, context: Context, request: Request) -> Answer:
    """The page's answer; what changes something is noted before and after."""
    if not page.event:
        return await page.handler(context)
    said = {
        "account": context.session.account,
        "role": context.session.role.name.lower(),
        "address": address_of(request),
        "path": request.url.path,
    }
    console.audit.write(page.event, context.form, state="begun", **said)
    try:
        answer = await page.handler(context)
    except BaseException as error:
        console.audit.write(page.event, context.form, state="failed", why=str(error), **said)
        raise
    console.audit.write(page.event, context.form, state="done", **said, **answer.noted)
    console.cached.forget()
    return answer


def is_live_part(request: Request) -> bool:
    """Does htmx ask for the part of a page that changes?"""
    return request.headers.get("hx-request") == "true"


def is_same_site(request: Request) -> bool:
    """Does a browser say that another site sends this? Programs say nothing."""
    origin = request.headers.get("origin")
    if origin is not None:
        return origin.partition("://")[2] == request.headers.get("host")
    return request.headers.get("sec-fetch-site", "none") in ("same-origin", "none")


def is_ours(request: Request, session: Session, form: Mapping[str, str]) -> bool:
    """Was this form in a page of this session?"""
    given = form.get("form_token", "").encode()
    return is_same_site(request) and hmac.compare_digest(given, session.form_token.encode())


async def read_form(request: Request, bytes_max: int = FORM_BYTES_MAX) -> dict[str, str] | None:
    """Its texts; None for one that is too large."""
    length = request.headers.get("content-length", "")
    if natural(length, bytes_max) is None:
        return None
    async with request.form(max_files=0, max_fields=200) as form:
        return {name: value for name, value in form.items() if isinstance(value, str)}


def to_sign_in(request: Request) -> Response:
    """And back again, when only something was to be shown."""
    is_shown = request.method == "GET" and request.url.path != "/"
    back = f"{path_of(request)}?{request.url.query}".rstrip("?")
    address = f"{SIGN_IN}?{urlencode({'next': back})}" if is_shown else SIGN_IN
    if is_live_part(request):
        return Response(status_code=204, headers={"hx-redirect": SIGN_IN})
    return RedirectResponse(address, 303)


def path_of(request: Request) -> str:
    """Of this page, to ask for it again: quoted as it was, and with one slash in front, for two
    begin the name of another site."""
    return quote(f"/{request.scope['path'].lstrip('/')}")


def address_of(request: Request) -> str:
    """Of who asks."""
    return request.client.host if request.client else ""


def cookie_name(request: Request) -> str:
    """Cookies do not know ports: two consoles of one machine have two names."""
    return f"sluice_console_{request.url.port or 443}"


def set_cookie(request: Request, response: Response, name: str, value: str, age_s: int) -> None:
    """One that no script reads and no other site sends along with a form. Behind a proxy with TLS
    it is the browser's own word that says so: headers of proxies anybody may write."""
    origin = request.headers.get("origin", "")
    is_secure = request.url.scheme == "https" or origin.startswith("https://")
    response.set_cookie(
        name, value, max_age=age_s, httponly=True, samesite="lax", secure=is_secure, path="/"
    )


# ---------------------------------------------------------------------------- preferences


def chosen(request: Request, name: str) -> str | None:
    """A preference as its cookie says."""
    value = request.cookies.get(f"sluice_console_{name}")
    return value if value in CHOICES[name] else None


def preferred(request: Request) -> Response | None:
    """`?language=` and `?theme=` of any page: kept, and on to the page without them."""
    wanted = {name: request.query_params.get(name) for name in CHOICES}
    given = {name: value for name, value in wanted.items() if value in CHOICES[name]}
    if request.method != "GET" or not given:
        return None
    response = RedirectResponse(with_query(request, dict.fromkeys(CHOICES)), 303)
    for name, value in given.items():
        assert value is not None
        set_cookie(request, response, f"sluice_console_{name}", value, YEAR_S)
    return response


def with_query(request: Request, changes: Mapping[str, object]) -> str:
    """This page's address with other values in its query; None takes one away."""
    query = dict(request.query_params) | dict(changes)
    text = urlencode({name: value for name, value in query.items() if value not in (None, "")})
    return f"{path_of(request)}{'?' if text else ''}{text}"


# -------------------------------------------------------------------------------- headers


class Headers:
    """Adds the headers of safety to every answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with(message: Message) -> None:
            if message["type"] == "http.response.start":
                path = scope.get("path", "")
                own = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                if path.startswith("/static/"):
                    own.append((b"cache-control", b"public, max-age=86400"))
                message["headers"] = [*message.get("headers", ()), *own]
            await send(message)

        await self._app(scope, receive, send_with if scope["type"] == "http" else send)


def made_templates() -> jinja2.Environment:
    """They escape whatever they are given, and know what is not."""
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= shown.FILTERS | {"segment": lambda text: quote(str(text), safe="")}
    return made
