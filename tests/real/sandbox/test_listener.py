"""Where an HTTP server listens: on loopback unless there is a token, and else it says why it cannot."""

import aiohttp
import pytest
from aiohttp import web

from sandbox.http.incoming import authorized, bodies_end
from sandbox.http.listener import Address, CannotListen, listening


def app_of(token=""):
    async def answer(request):
        return web.Response(text="here")

    @web.middleware
    async def refusals(request, handler):
        try:
            return await handler(request)
        except Exception as error:
            return web.Response(status=error.status, text=str(error))

    app = web.Application(middlewares=[bodies_end, refusals, authorized(token)])
    app.router.add_get("/", answer)
    return app


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
async def test_it_is_reached_at_the_address_that_it_gives(host):
    async with listening(app_of(), Address(host=host)) as url, aiohttp.ClientSession() as client:
        async with client.get(url) as response:
            assert (response.status, await response.text()) == (200, "here")
        async with client.get(url, headers={"Host": "evil.example"}) as response:
            assert response.status == 403
    async with aiohttp.ClientSession() as client:
        with pytest.raises(aiohttp.ClientConnectionError):
            await client.get(url)


async def test_a_token_is_required_where_there_is_one():
    async with listening(app_of("secret"), Address(token="secret")) as url, aiohttp.ClientSession() as client:
        for headers, status in (
            ({}, 401),
            ({"Authorization": "Bearer other"}, 401),
            ({"Authorization": "Bearer secret"}, 200),
            ({"x-api-key": "secret"}, 200),
        ):
            async with client.get(url, headers=headers) as response:
                assert response.status == status
        async with client.get(url.replace("http://", "http://any:secret@")) as response:
            assert response.status == 200


async def test_a_taken_port_is_named():
    async with listening(app_of(), Address()) as url:
        port = int(url.rpartition(":")[2])
        with pytest.raises(CannotListen, match=str(port)):
            async with listening(app_of(), Address(port=port)):
                pass
