"""Signing in and out: an account of the console, an access key of the cluster, or the link.

An access key is right when the cluster takes what it signs, and refuses what the same key signs
with another secret: a cluster that checks nothing lets nobody in. Who may see how access rules
stand is admin there; all others operate, within what the cluster lets them do.
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
    address_of,
    cookie_name,
    is_ours,
    is_same_site,
    preferred,
    read_form,
    set_cookie,
)
from sluicemq.console.sessions import LIFE_S, Session
from sluicemq.errors import ClientError, PermissionDeniedError, RequestError, SluiceError
from sluicemq.wire.codes import RequestCode
from sluicemq.wire.frames import Command

LINK: Final = "/enter"
FORM_BYTES_MAX: Final = 4096
"""Of who is not known yet; a name and a secret need less."""
OWNER: Final = "owner"


def routes(console: Console) -> list[Route]:
    """Of all that is asked before somebody is known."""

    def bound(method: Callable[[Console, Request], Any]) -> Callable[[Request], Any]:
        async def endpoint(request: Request) -> Response:
            response: Response = await method(console, request)
            return response

        return endpoint

    return [
        Route(SIGN_IN, bound(show), methods=["GET"]),
        Route(SIGN_IN, bound(sign_in), methods=["POST"]),
        Route("/sign-out", bound(sign_out), methods=["POST"]),
        Route(LINK, bound(enter), methods=["GET"]),
    ]


async def show(console: Console, request: Request) -> Response:
    """The form."""
    return preferred(request) or console.render(request, "sign_in.html", failure="", name="")


async def sign_in(console: Console, request: Request) -> Response:
    """By the form; each try is noted."""
    form = await read_form(request, FORM_BYTES_MAX)
    if form is None or not is_same_site(request):
        return console.refuse(request, 403, "error.form")
    name, secret, address = form.get("name", ""), form.get("secret", ""), address_of(request)
    kind = form.get("kind", "")
    if len(name) > NAME_LENGTH_MAX:  # nobody's: neither counted nor noted
        return console.render(request, "sign_in.html", 401, failure="sign_in.wrong", name="")
    said = {"account": name, "address": address}
    if console.throttle.wait_s(name, address) > 0:
        console.audit.write("sign-in", {}, state="throttled", **said)
        return console.render(request, "sign_in.html", 429, failure="sign_in.wait", name=name)
    console.throttle.failed(name, address)  # before it is known: tries may come side by side
    try:
        check = by_key if kind == "key" else by_account
        session = await check(console, name, secret)
    except SluiceError as error:
        console.audit.write("sign-in", {}, state="failed", why=str(error), **said)
        return console.failed(request, error, None)
    if session is None:
        console.audit.write("sign-in", {}, state="refused", **said)
        return console.render(request, "sign_in.html", 401, failure="sign_in.wrong", name=name)
    console.throttle.succeeded(name, address)
    console.audit.write("sign-in", {}, state="done", role=session.role.name.lower(), **said)
    return _begin(console, request, session, local_path(request.query_params.get("next", "")))


async def by_account(console: Console, name: str, secret: str) -> Session | None:
    """None for a wrong secret."""
    account = await asyncio.to_thread(console.accounts.check, name, secret)
    if account is None:
        return None
    return Session(account.name, account.role, is_local=True, secret_hash=account.hash)


async def by_key(console: Console, key: str, secret: str) -> Session | None:
    """None for a secret that the cluster does not take. Raises SluiceError when it does not say."""
    if not key or not secret or await _is_taken(console, key, secrets.token_urlsafe()):
        return None
    if not await _is_taken(console, key, secret):
        return None
    role = Role.OPERATE
    with contextlib.suppress(RequestError):
        await console.client((key, secret)).admin.access_status()
        role = Role.ADMIN
    return Session(key, role, (key, secret))


async def _is_taken(console: Console, key: str, secret: str) -> bool:
    """Does a broker take what is signed so? False is its refusal of rights alone: another error
    says nothing of the secret, and is raised."""
    client = console.connect((key, secret))
    try:
        for address in (await client.admin.masters()).values():
            command = Command(RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_BROKER)  # asks for no right
            expect_success(await client.cluster.call(address, command), address)
            return True
    except PermissionDeniedError:
        return False
    finally:
        await client.close()
    raise ClientError("no broker is there to check the access key.", fix="Start one.")


async def enter(console: Console, request: Request) -> Response:
    """By the link, once, while there are no accounts."""
    is_it = console.sessions.take_link(request.query_params.get("token", ""))
    is_it = is_it and not console.accounts.all()
    state = "done" if is_it else "refused"
    console.audit.write("link", {}, state=state, address=address_of(request))
    if not is_it:
        return console.refuse(request, 403, "error.link")
    return _begin(console, request, Session(OWNER, Role.ADMIN), "/")


async def sign_out(console: Console, request: Request) -> Response:
    """Ends the session."""
    session, form = console.session(request), await read_form(request)
    if session is not None and form is not None and is_ours(request, session, form):
        console.sessions.end(request.cookies.get(cookie_name(request), ""))
    response = RedirectResponse(SIGN_IN, 303)
    response.delete_cookie(cookie_name(request))
    return response


def _begin(console: Console, request: Request, session: Session, address: str) -> Response:
    """With a token that nobody has had before."""
    console.sessions.end(request.cookies.get(cookie_name(request), ""))
    response = RedirectResponse(address, 303)
    token = console.sessions.begin(session)
    set_cookie(request, response, cookie_name(request), token, int(LIFE_S))
    return response


def local_path(text: str) -> str:
    """Of this console; "/" for an address elsewhere."""
    is_local = text.startswith("/") and not text.startswith("//") and "\\" not in text
    return text if is_local and text.isprintable() else "/"
