"""Pages: the page of the workbench and its scripts."""

import mimetypes
from importlib.resources import files

from fastapi import FastAPI, HTTPException, Request, Response

ROOMS = ("app", "views")


def add_pages(application: FastAPI) -> None:
    """Serve the page and its scripts."""
    # All files are read at the start and looked up by their whole path, so that no path
    # of a request ever reaches the disk.
    served: dict[str, bytes] = {}
    for room in ROOMS:
        folder = files(f"hiddenscope.{room}") / "static"
        for file in folder.iterdir():
            if file.is_file():
                served[f"/{room}/static/{file.name}"] = file.read_bytes()
    index = served["/app/static/index.html"]

    @application.get("/", include_in_schema=False)
    async def page() -> Response:
        return Response(index, media_type="text/html")

    @application.get("/favicon.ico", include_in_schema=False)
    async def icon() -> Response:
        return Response(b"", 204)

    @application.get("/{room}/static/{name}", include_in_schema=False)
    async def static(request: Request) -> Response:
        path = request.url.path
        if path not in served:
            raise HTTPException(404, "There is no such file.")
        media_type = mimetypes.guess_type(path)[0] or "text/plain"
        # Older systems say application/javascript.
        if media_type.endswith("javascript"):
            media_type = "text/javascript"
        return Response(served[path], media_type=media_type)
