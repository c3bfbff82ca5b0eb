"""Workers: isolated subprocesses, and how they talk to the process that starts them.

frames    messages on a pipe
process   a worker as its parent sees it, and the pipes as the worker sees them
"""

from hiddenscope.workers.frames import Channel as Channel
from hiddenscope.workers.frames import Frame as Frame
from hiddenscope.workers.frames import Header as Header
from hiddenscope.workers.frames import pack_frame as pack_frame
from hiddenscope.workers.frames import read_frame as read_frame
from hiddenscope.workers.process import WorkerProcess as WorkerProcess
from hiddenscope.workers.process import available_cores as available_cores
from hiddenscope.workers.process import parent_channel as parent_channel
