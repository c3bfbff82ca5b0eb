"""The workbench: a local web app over every analysis. `hiddenscope serve` starts it.

settings    where it listens, its limits
guard       who may come in: Host, token, Origin, size
connections how many clients there may be, and how long one may keep the server waiting
schemas     requests and answers, generated from the signatures of the analyses
routes      the API, and the page
jobs        the queue, one model job at a time
process     the worker process, as the server sees it
worker      the worker process itself, which has torch
questions   what the worker answers
frames      how the two talk
cache       results once computed, on disk
library     the models, datasets and states to choose from
stores      what kept states hold, and their texts
code        a question as Python, and as a command

The server imports no torch.
"""

from hiddenscope.app.server import SHIPPED as SHIPPED
from hiddenscope.app.server import Settings as Settings
