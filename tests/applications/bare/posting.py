"""Requests to a receiver's application, without a server."""

import io


def post_wsgi(app, request):
    """The status of a request."""
    environ = {
        "REQUEST_METHOD": "POST",
        "PATH_INFO": "/hooks",
        "CONTENT_LENGTH": str(len(request.body)),
        "wsgi.input": io.BytesIO(request.body),
        **{f"HTTP_{n.upper().replace('-', '_')}": v for n, v in dict(request.headers).items()},
    }
    begun = []
    list(app(environ, lambda status, headers: begun.append(status)))
    return int(begun[0].split()[0])


async def post_asgi(app, request):
    """The status of a request."""
    headers = [(n.lower().encode(), v.encode()) for n, v in dict(request.headers).items()]
    scope = {"type": "http", "method": "POST", "path": "/hooks", "headers": headers}
    sent = []

    async def receive():
        return {"type": "http.request", "body": request.body}

    async def send(message):
        sent.append(message)

    await app(scope, receive, send)
    return sent[0]["status"]
