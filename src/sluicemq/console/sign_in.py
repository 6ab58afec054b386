"""Sign in and out: with an account of the console, an access key of the cluster, or the link.

An access key is accepted if the cluster accepts what it signs, and refuses what the same key signs
with another secret. So a cluster that does not check signatures admits no key. A user who may read
the state of the access rules has the role ADMIN. All others have the role OPERATE, within what the
cluster allows them.
"""

import asyncio
import contextlib
import secrets
from collections.abc import Callable
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from sluicemq.client.core.requests import expect_success
from sluicemq.console.accounts import NAME_LENGTH_MAX, Role
from sluicemq.console.app import (
    SIGN_IN,
    Console,
    client_address,
    cookie_name,
    has_form_token,
    is_same_site,
    read_form,
    save_preferences,
    set_cookie,
)
from sluicemq.console.sessions import LIFE_S, Session
from sluicemq.errors import ClientError, PermissionDeniedError, RequestError, SluiceError
from sluicemq.wire.codes import RequestCode
from sluicemq.wire.frames import Command

LINK: Final = "/enter"
"""The path of the link."""
FORM_BYTES_MAX: Final = 4096
"""The largest form from a client that has not signed in."""
OWNER: Final = "owner"
"""The account name of a user who signed in by the link."""


def routes(console: Console) -> list[Route]:
    """Return the routes of requests that need no session."""

    def bind(handler: Callable[[Console, Request], Any]) -> Callable[[Request], Any]:
        """Return an endpoint that calls `handler` with the console."""

        async def endpoint(request: Request) -> Response:
            response: Response = await handler(console, request)
            return response

        return endpoint

    return [
        Route(SIGN_IN, bind(show), methods=["GET"]),
        Route(SIGN_IN, bind(sign_in), methods=["POST"]),
        Route("/sign-out", bind(sign_out), methods=["POST"]),
        Route(LINK, bind(sign_in_by_link), methods=["GET"]),
    ]


async def show(console: Console, request: Request) -> Response:
    """Return the page with the sign-in form, or a redirect that saves preferences in the query."""
    return save_preferences(request) or console.render(request, "sign_in.html", failure="", name="")


async def sign_in(console: Console, request: Request) -> Response:
    """Check the name and the secret in the form, and start a session if they are right.

    The response is a redirect to the path in the query value `next`, or to "/". It is 401 for a
    wrong name or secret, 429 for a name that must wait after failures, and 403 for a form that is
    too large or comes from another site. Each attempt is counted and written to the audit log,
    except for names of more than NAME_LENGTH_MAX characters.
    """
    form = await read_form(request, FORM_BYTES_MAX)
    if form is None or not is_same_site(request):
        return console.render_refusal(request, 403, "error.form")
    name = form.get("name", "")
    secret = form.get("secret", "")
    is_access_key = form.get("kind", "") == "key"
    address = client_address(request)
    if len(name) > NAME_LENGTH_MAX:  # no account has such a name: it is neither counted nor logged
        return console.render(request, "sign_in.html", 401, failure="sign_in.wrong", name="")

    audit_fields = {"account": name, "address": address}
    if console.throttle.wait_s(name, address) > 0:
        console.audit.write("sign-in", {}, state="throttled", **audit_fields)
        return console.render(request, "sign_in.html", 429, failure="sign_in.wait", name=name)
    # The attempt counts as a failure until it has succeeded, because a client may send several
    # attempts at the same time.
    console.throttle.add_failure(name, address)

    try:
        if is_access_key:
            session = await check_access_key(console, name, secret)
        else:
            session = await check_account(console, name, secret)
    except SluiceError as error:
        console.audit.write("sign-in", {}, state="failed", why=str(error), **audit_fields)
        return console.render_error(request, error, None)
    if session is None:
        console.audit.write("sign-in", {}, state="refused", **audit_fields)
        return console.render(request, "sign_in.html", 401, failure="sign_in.wrong", name=name)

    console.throttle.add_success(name, address)
    role_name = session.role.name.lower()
    console.audit.write("sign-in", {}, state="done", role=role_name, **audit_fields)
    next_path = local_path(request.query_params.get("next", ""))
    return _start_session(console, request, session, next_path)


async def check_account(console: Console, name: str, secret: str) -> Session | None:
    """Return a session for an account of the console, or None if the secret is wrong."""
    account = await asyncio.to_thread(console.accounts.authenticate, name, secret)
    if account is None:
        return None
    return Session(account.name, account.role, is_local=True, secret_hash=account.hash)


async def check_access_key(console: Console, key: str, secret: str) -> Session | None:
    """Check an access key of the cluster, and return a session for it, None if it is wrong.

    The result is also None if the cluster accepts a random secret, because it then checks no
    signatures. The role is ADMIN if the key may read the state of the access rules, else OPERATE.
    Raises SluiceError if the cluster cannot be asked.
    """
    if not key or not secret:
        return None

    # A cluster that accepts any secret does not check signatures, so the key proves nothing.
    wrong_secret = secrets.token_urlsafe()
    if await _is_accepted(console, key, wrong_secret):
        return None
    if not await _is_accepted(console, key, secret):
        return None

    role = Role.OPERATE
    with contextlib.suppress(RequestError):
        await console.client((key, secret)).admin.access_status()
        role = Role.ADMIN
    return Session(key, role, (key, secret))


async def _is_accepted(console: Console, key: str, secret: str) -> bool:
    """Return whether a broker accepts a request that is signed with these credentials.

    One broker is asked. The result is False if it refuses the request for lack of permission. Any
    other error is raised, because it says nothing about the secret. Raises ClientError if there is
    no broker.
    """
    client = console.connect((key, secret))
    try:
        masters = await client.admin.masters()
        if not masters:
            raise ClientError("There is no broker to check the access key.", fix="Start one.")
        address = next(iter(masters.values()))
        # This request needs no permission, only a valid signature.
        command = Command(RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_BROKER)
        response = await client.cluster.call(address, command)
        expect_success(response, address)
    except PermissionDeniedError:
        return False
    finally:
        await client.close()
    return True


async def sign_in_by_link(console: Console, request: Request) -> Response:
    """Start a session with the role ADMIN by the link that the console printed at its start.

    The query value `token` is that of the link. The response is a redirect to "/". It is 403 if the
    link is wrong or was used before, or if the console has accounts. Each attempt is written to the
    audit log, as "link" with the state "done" or "refused".
    """
    token = request.query_params.get("token", "")
    # The link is used up even if there are accounts, so that it cannot work later.
    is_current_link = console.sessions.take_link(token)
    is_valid = is_current_link and not console.accounts.load()
    state = "done" if is_valid else "refused"
    console.audit.write("link", {}, state=state, address=client_address(request))
    if not is_valid:
        return console.render_refusal(request, 403, "error.link")
    owner_session = Session(OWNER, Role.ADMIN)
    return _start_session(console, request, owner_session, "/")


async def sign_out(console: Console, request: Request) -> Response:
    """End the session, and return a redirect to the sign-in page that deletes the cookie.

    If the form lacks the token of the session, only the cookie is deleted, so that other sites
    cannot end the session.
    """
    session = console.find_session(request)
    form = await read_form(request)
    if session is not None and form is not None and has_form_token(request, session, form):
        console.sessions.end(request.cookies.get(cookie_name(request), ""))
    response = RedirectResponse(SIGN_IN, 303)
    response.delete_cookie(cookie_name(request))
    return response


def _start_session(console: Console, request: Request, session: Session, path: str) -> Response:
    """End the present session of the browser, start `session`, and return a redirect to `path`.

    The token of the new session is set as a cookie.
    """
    console.sessions.end(request.cookies.get(cookie_name(request), ""))
    response = RedirectResponse(path, 303)
    token = console.sessions.start(session)
    set_cookie(request, response, cookie_name(request), token, int(LIFE_S))
    return response


def local_path(path: str) -> str:
    """Return `path` if it is a path of this console, else "/".

    Two slashes or a backslash can begin the address of another site.
    """
    is_local = path.startswith("/") and not path.startswith("//") and "\\" not in path
    return path if is_local and path.isprintable() else "/"
