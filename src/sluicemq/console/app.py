"""The web application: from a request to a page, by the declared table of pages.

All requests for pages take the same steps: find the session, check its role, check the form's token
(CSRF), call the page's coroutine, and render its template. A SluiceError becomes a page with its
text and its fix. Any other exception is logged, and the page says so. Response headers make
browsers load nothing from other sites, and run no script that is written into a page.
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
from sluicemq.console.audit import AuditLog
from sluicemq.console.context import Answer, Cache, Context, Page
from sluicemq.console.history import History
from sluicemq.console.sentences import LANGUAGES, choose_language, notice_key, translator
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
"""The largest form: a message of RocketMQ's maximum size, in the encoding of forms."""
THEMES: Final = ("auto", "light", "dark")
CHOICES: Final = {"language": LANGUAGES, "theme": THEMES}
"""The values of each preference."""
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
    TopicNotFoundError: 404,
    GroupNotFoundError: 404,
    MessageNotFoundError: 404,
    RouteNotFoundError: 404,
    PermissionDeniedError: 403,
    ConfigurationError: 400,
    FilterError: 400,
    ClientError: 502,
    SluiceError: 502,
}

Connect = Callable[[Credentials | None], Sluice]
"""Returns a client that signs with the credentials; None means those of the console."""


class Console:
    """The state that all requests share: clients, accounts, sessions, caches and history."""

    def __init__(
        self,
        connect: Connect,
        accounts: Accounts,
        *,
        audit: AuditLog | None = None,
        is_read_only: bool = False,
        pipelines: tuple[str, ...] = (),
        proxies: tuple[str, ...] = (),
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """Create a console.

        `connect(credentials)` creates its clients of the cluster. Users sign in with one of
        `accounts`. Changes are written to `audit`; None means the log of the process. If
        `is_read_only` is True, all changes are refused, whatever the role of the user. `pipelines`
        are directories with the progress of pipelines, and `proxies` addresses of proxies whose
        clients are shown. `clock` measures all times.
        """
        self.accounts = accounts
        self.is_read_only = is_read_only
        self.clock = clock
        self.audit = audit or AuditLog(clock)
        self.sessions = Sessions(clock)
        self.throttle = Throttle(clock)
        self.cache = Cache(clock)
        self.history = History(clock)
        self.connect = connect
        self.pipelines = pipelines
        self.proxies = proxies
        self._clients: dict[Credentials | None, Sluice] = {}  # None: those of the console
        self._templates = create_templates()

    def client(self, credentials: Credentials | None) -> Sluice:
        """Return the client that signs with the credentials; None means those of the console.

        The client is created on first use, and returned again until the console is closed.
        """
        if credentials not in self._clients:
            self._clients[credentials] = self.connect(credentials)
        return self._clients[credentials]

    async def close(self) -> None:
        """Close all clients and the audit log."""
        for client in self._clients.values():
            await client.close()
        self.audit.close()

    @contextlib.asynccontextmanager
    async def lifespan(self, _app: Starlette) -> AsyncIterator[None]:
        """Return a context manager for the time in which the server runs; Starlette enters it.

        During it, a background task measures the cluster for the charts. At its end, the task is
        cancelled and the console's clients are closed.
        """
        tasks = Tasks()
        admin = self.client(None).admin
        tasks.supervise(lambda: self.history.run(admin), "console history")
        try:
            yield
        finally:
            await tasks.close()
            await self.close()

    def build_app(self, pages: tuple[Page, ...], public_routes: Sequence[Route]) -> Starlette:
        """Return the ASGI application with all pages, and the files below /static.

        The navigation lists `pages`, too. `public_routes` need no session, for example those for
        signing in.
        """
        self.pages = pages
        static_files = Mount("/static", StaticFiles(directory=HERE / "static"))
        page_routes = [
            Route(page.path, build_endpoint(self, page), methods=[page.method]) for page in pages
        ]
        return Starlette(
            routes=[static_files, *public_routes, *page_routes],
            middleware=[Middleware(SecurityHeaders)],
            exception_handlers={
                HTTPException: self.handle_not_found,
                Exception: self.handle_unexpected,
            },
            lifespan=self.lifespan,
        )

    # ---- sessions

    def find_session(self, request: Request) -> Session | None:
        """Return the session that the cookie of a request names, None without one.

        The request renews the session, unless a page sent it by itself to update its live part. The
        role is the one that the account has now. The result is None if the account was removed or
        its secret has changed.
        """
        token = request.cookies.get(cookie_name(request), "")
        session = self.sessions.find(token, renews=not is_live_part(request))
        if session is not None and session.is_local:
            account = self.accounts.load().get(session.account)
            if account is None or account.hash != session.secret_hash:
                return None
            return replace(session, role=account.role)
        return session

    # ---- responses

    def render(
        self, request: Request, template: str, status: int = 200, **values: Any
    ) -> HTMLResponse:
        """Return the page of a template with these values.

        If the request is for the live part of a page, which the page loads by itself again and
        again, only that part is returned. Templates also get values that all pages need, such as
        the language and what the user may do.
        """
        language = read_preference(request, "language") or choose_language(
            request.headers.get("accept-language", "")
        )
        session: Session | None = values.setdefault("session", None)
        html = self._templates.get_template(template).render(
            layout="live.html" if is_live_part(request) else "layout.html",
            t=translator(language),
            language=language,
            languages=LANGUAGES,
            theme=read_preference(request, "theme") or THEMES[0],
            themes=THEMES,
            pages=self._list_navigation(session),
            here=page_path(request),
            notice=notice_key(request.query_params.get("done", "")),
            query=dict(request.query_params),
            with_query=lambda **changes: with_query(request, changes),
            version=__version__,
            is_read_only=self.is_read_only,
            may=self._list_permissions(session),
            **values,
        )
        return HTMLResponse(html, status, {"cache-control": "no-store"})

    def _list_navigation(self, session: Session | None) -> list[Page]:
        """Return the pages in the navigation that the user may see; none without a session."""
        if session is None:
            return []
        return [page for page in self.pages if page.entry and session.role >= page.role]

    def _list_permissions(self, session: Session | None) -> dict[str, bool]:
        """Return for each role, by its name, whether the user may make the changes that it allows.

        They are all False without a session, and if the console is read-only.
        """
        if session is None or self.is_read_only:
            return {role.name.lower(): False for role in Role}
        return {role.name.lower(): role <= session.role for role in Role}

    def render_refusal(
        self, request: Request, status: int, sentence: str, session: Session | None = None
    ) -> Response:
        """Return a page with the text of the key `sentence`, which says why it was refused."""
        return self.render(request, "error.html", status, sentence=sentence, session=session)

    def render_error(
        self, request: Request, error: SluiceError, session: Session | None
    ) -> Response:
        """Return a page with the text and the fix of an error.

        The HTTP status is that of the error's class or its nearest base class in `_STATUS`.
        """
        status = next(_STATUS[base] for base in type(error).__mro__ if base in _STATUS)
        fact = error.fact
        return self.render(request, "error.html", status, fact=fact, fix=error.fix, session=session)

    async def handle_not_found(self, request: Request, error: Exception) -> Response:
        """Return the page for an address that does not exist."""
        status = error.status_code if isinstance(error, HTTPException) else 500
        return self.render_refusal(request, status, "error.not_found", self.find_session(request))

    async def handle_unexpected(self, request: Request, error: Exception) -> Response:
        """Log an exception that is not a SluiceError, and return a page that says so."""
        log.error("%s %s", request.method, request.url.path, exc_info=error)
        return self.render_refusal(request, 500, "error.unexpected", self.find_session(request))


# ---- requests


def build_endpoint(console: Console, page: Page) -> Callable[[Request], Any]:
    """Return the endpoint of a page: a coroutine function from a request to its response.

    It does the following, in this order:

    - save preferences in the query, and redirect to the page without them;
    - redirect to the sign-in page if there is no session;
    - respond with 403 if the user's role does not suffice, if the page changes something and the
      console is read-only, or if its form has no valid token;
    - call the handler of the page, and respond with its redirect, or with the rendered template. A
      SluiceError becomes an error page.
    """

    async def endpoint(request: Request) -> Response:
        """Return the response to a request for the page."""
        if preference_redirect := save_preferences(request):
            return preference_redirect
        session = console.find_session(request)
        if session is None:
            return redirect_to_sign_in(request)
        is_change = bool(page.audit_event)
        if session.role < page.role or (is_change and console.is_read_only):
            reason = "error.read_only" if console.is_read_only else "error.role"
            return console.render_refusal(request, 403, reason, session)
        form: dict[str, str] = {}
        if is_change:
            submitted_form = await read_form(request)
            if submitted_form is None or not has_form_token(request, session, submitted_form):
                return console.render_refusal(request, 403, "error.form", session)
            form = submitted_form

        context = _make_context(console, request, session, form)
        try:
            answer = await run_handler(console, page, context, request)
        except SluiceError as error:
            return console.render_error(request, error, session)
        if answer.redirect:
            return RedirectResponse(answer.redirect, 303)
        return console.render(
            request, page.template, answer.status, session=session, **answer.values
        )

    return endpoint


def _make_context(
    console: Console, request: Request, session: Session, form: dict[str, str]
) -> Context:
    """Collect what the handler of a page needs: the request, and the console's state."""
    return Context(
        mq=console.client(session.credentials),
        session=session,
        cache=console.cache,
        history=console.history,
        clock=console.clock,
        path={name: str(segment) for name, segment in request.path_params.items()},
        query=dict(request.query_params),
        form=form,
        is_live=is_live_part(request),
        pipelines=console.pipelines,
        proxies=console.proxies,
    )


async def run_handler(console: Console, page: Page, context: Context, request: Request) -> Answer:
    """Call the handler of a page, and return its answer. Raises what the handler raises.

    If the page changes something, the audit log gets a line before the call ("begun") and one after
    it ("done" or "failed"). After a successful change, the console's cache is cleared.
    """
    if not page.audit_event:
        return await page.handler(context)
    audit_fields = {
        "account": context.session.account,
        "role": context.session.role.name.lower(),
        "address": client_address(request),
        "path": request.url.path,
    }
    console.audit.write(page.audit_event, context.form, state="begun", **audit_fields)
    try:
        answer = await page.handler(context)
    except BaseException as error:
        console.audit.write(
            page.audit_event, context.form, state="failed", why=str(error), **audit_fields
        )
        raise
    console.audit.write(
        page.audit_event, context.form, state="done", **audit_fields, **answer.audit_values
    )
    console.cache.clear()
    return answer


def is_live_part(request: Request) -> bool:
    """Return whether htmx requests only the live part of a page."""
    return request.headers.get("hx-request") == "true"


def is_same_site(request: Request) -> bool:
    """Return False if a browser says that a page of another site sent the request.

    Browsers say so in the header Origin or, without it, in Sec-Fetch-Site. Other programs send
    neither header, and the result is True.
    """
    origin = request.headers.get("origin")
    if origin is not None:
        return origin.partition("://")[2] == request.headers.get("host")
    return request.headers.get("sec-fetch-site", "none") in ("same-origin", "none")


def has_form_token(request: Request, session: Session, form: Mapping[str, str]) -> bool:
    """Return whether a form comes from a page of this session.

    It must contain the session's form token, and the request must not come from another site.
    """
    given_token = form.get("form_token", "").encode()
    return is_same_site(request) and hmac.compare_digest(given_token, session.form_token.encode())


async def read_form(request: Request, bytes_max: int = FORM_BYTES_MAX) -> dict[str, str] | None:
    """Return name -> text of a form; None if it has more than `bytes_max` bytes or no length.

    Files in the form are left out.
    """
    length = request.headers.get("content-length", "")
    if natural(length, bytes_max) is None:
        return None
    async with request.form(max_files=0, max_fields=200) as form:
        return {name: text for name, text in form.items() if isinstance(text, str)}


def redirect_to_sign_in(request: Request) -> Response:
    """Return a redirect to the sign-in page.

    After signing in, the user returns to the requested page, unless that is "/" or the request was
    not a GET. If the page requested its live part by itself, the response tells htmx to load the
    sign-in page in place of the whole page.
    """
    is_shown = request.method == "GET" and request.url.path != "/"
    back = f"{page_path(request)}?{request.url.query}".rstrip("?")
    address = f"{SIGN_IN}?{urlencode({'next': back})}" if is_shown else SIGN_IN
    if is_live_part(request):
        return Response(status_code=204, headers={"hx-redirect": SIGN_IN})
    return RedirectResponse(address, 303)


def page_path(request: Request) -> str:
    """Return the quoted path of the request, for links to the same page.

    It begins with exactly one slash, because two begin the address of another site.
    """
    return quote(f"/{request.scope['path'].lstrip('/')}")


def client_address(request: Request) -> str:
    """Return the IP address of the client, or "" if it is unknown."""
    return request.client.host if request.client else ""


def cookie_name(request: Request) -> str:
    """Return the name of the session's cookie.

    It contains the port, because browsers share cookies between the ports of a host.
    """
    return f"sluice_console_{request.url.port or 443}"


def set_cookie(request: Request, response: Response, name: str, value: str, age_s: int) -> None:
    """Set a cookie that scripts cannot read, and that forms of other sites do not send.

    It is marked secure if the browser uses TLS. If a proxy in front of the console ends TLS, the
    Origin header of the browser shows that. Headers of proxies are not used, because any client can
    write them.
    """
    origin = request.headers.get("origin", "")
    is_secure = request.url.scheme == "https" or origin.startswith("https://")
    response.set_cookie(
        name, value, max_age=age_s, httponly=True, samesite="lax", secure=is_secure, path="/"
    )


# ---- preferences


def read_preference(request: Request, name: str) -> str | None:
    """Return the preference in the request's cookie, or None if there is no valid one."""
    value = request.cookies.get(f"sluice_console_{name}")
    return value if value in CHOICES[name] else None


def save_preferences(request: Request) -> Response | None:
    """Save the preferences `?language=` and `?theme=` of a request in cookies.

    Returns a redirect to the same page without these query values, which sets the cookies. Returns
    None if the request is not a GET, or has no valid preference.
    """
    preferences: dict[str, str] = {}
    for name, choices in CHOICES.items():
        choice = request.query_params.get(name)
        if choice is not None and choice in choices:
            preferences[name] = choice
    if request.method != "GET" or not preferences:
        return None
    response = RedirectResponse(with_query(request, dict.fromkeys(CHOICES)), 303)
    for name, choice in preferences.items():
        set_cookie(request, response, f"sluice_console_{name}", choice, YEAR_S)
    return response


def with_query(request: Request, changes: Mapping[str, object]) -> str:
    """Return the address of this page with `changes` applied to its query.

    `{"page": 2}` sets a value; None or "" as value removes a name.
    """
    query = dict(request.query_params) | dict(changes)
    kept_fields = {name: value for name, value in query.items() if value not in (None, "")}
    path = page_path(request)
    return f"{path}?{urlencode(kept_fields)}" if kept_fields else path


# ---- headers and templates


class SecurityHeaders:
    """Middleware that adds the security headers `HEADERS` to every response."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on to the application, and add the headers to its response."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        added_headers = [(name.encode(), text.encode()) for name, text in HEADERS.items()]
        if scope.get("path", "").startswith("/static/"):
            added_headers.append((b"cache-control", b"public, max-age=86400"))

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *added_headers]
            await send(message)

        await self._app(scope, receive, send_with_headers)


def create_templates() -> jinja2.Environment:
    """Return the jinja2 environment in which the templates are rendered.

    Values are escaped for HTML. A template that uses an undefined value raises an error.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= shown.FILTERS | {"segment": lambda text: quote(str(text), safe="")}
    return environment
