"""The page's server: one process, one thread of requests, until Ctrl-C; runs that it started continue."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote

from board.app import make_app
from board.commands import folders_of
from board.service import Board
from settings.declared import Config
from settings.fields import AUTO
from support.language import say
from support.web.listening import address_of, listen, own_names, server_of, token_of

PORT = 8300
LEAVE_SECONDS = 1  # given to open streams at the end


def serve(config: Config) -> None:
    """Serve until interrupted.

    Raises:
        UserError: the address cannot be listened at, or would let others in without a token; a folder is a file.
    """
    settings = config.board
    folders = folders_of(config.run.log_dir, config.run.output_dir, settings.data_dir)
    token = token_of(settings.token, settings.host)
    listener = listen(settings.host, PORT if settings.port == AUTO else int(settings.port))
    app = make_app(Board(folders, Path.cwd()), token, own_names(settings.host))
    address = address_of(settings.host, listener) + "/" + (f"?token={quote(token, safe='')}" if token else "")
    print(say("the page is at {where}  (Ctrl-C stops the page; runs continue)", where=address), flush=True)
    server_of(app, LEAVE_SECONDS).run(sockets=[listener])
