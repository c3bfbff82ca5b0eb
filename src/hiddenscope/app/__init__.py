"""The workbench: a local web app over every analysis. `hiddenscope serve` starts it.

settings     where it listens, its limits
application  its parts put together, and the server
guard        who may come in: Host, token, Origin, size
connections  how many clients there may be, and how long one may keep the server waiting
schemas      requests and answers, built from the descriptions of the analyses
routes       the API
desk         what the routes share: a request becomes a question for the worker
pages        the page and its scripts
jobs         the queue, one model job at a time
process      the worker process, as the server sees it
worker       the worker process itself, which has torch
questions    what the worker answers
cells        those about one state of one text
stored       those about stored states
answers      a result as it travels to the page
models       what the worker keeps between two questions
cache        results once computed, on disk
library      the models, datasets and states to choose from
uploads      labelled texts that a page has sent
stores       what stored states hold, and their texts
tables       the columns of a file, before it is uploaded
code         a question as Python, and as a command

The server imports no torch.
"""

from hiddenscope.app.application import SHIPPED as SHIPPED
from hiddenscope.app.application import create_app as create_app
from hiddenscope.app.application import server as server
from hiddenscope.app.settings import Settings as Settings
