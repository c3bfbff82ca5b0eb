"""The workbench: a local web app over every analysis. `hiddenscope serve` starts it.

settings     where it listens, its limits
application  its parts put together, the page and its scripts, and the server
guard        who may come in: Host, token, Origin, size
schemas      requests and answers, built from the descriptions of the analyses
routes       the API: a request becomes a question for the worker
jobs         the queue, one model job at a time, and the worker as the server sees it
worker       the worker process itself, which has torch
questions    what the worker answers
cells        those that only the page asks, and the models that are kept for the next
answers      a result as it travels to the page
cache        results once computed, on disk
library      the models, datasets and stored states to choose from
uploads      labelled texts that a page has sent, and their columns before that
code         a question as Python, and as a command

The server imports no torch.
"""

from hiddenscope.app.application import SHIPPED, create_app, server
from hiddenscope.app.guard import is_loopback
from hiddenscope.app.settings import Settings

__all__ = ["SHIPPED", "Settings", "create_app", "is_loopback", "server"]
