"""What can be asked: every analysis declares it by the signature of its function, and
commands, requests, forms and code are made of that. Nothing here imports torch.

declaration  reads a signature
parameters   what is known of one parameter, and those that many analyses share
"""

from hiddenscope.interface.declaration import analysis as analysis
from hiddenscope.interface.declaration import ask as ask
from hiddenscope.interface.declaration import build_value as build_value
from hiddenscope.interface.declaration import declared as declared
from hiddenscope.interface.declaration import describe as describe
from hiddenscope.interface.declaration import flattened as flattened
from hiddenscope.interface.declaration import readable as readable
from hiddenscope.interface.parameters import POOL as POOL
from hiddenscope.interface.parameters import POOL_BY_STACK as POOL_BY_STACK
from hiddenscope.interface.parameters import SEED as SEED
from hiddenscope.interface.parameters import SITE as SITE
from hiddenscope.interface.parameters import SITES as SITES
from hiddenscope.interface.parameters import STACK_POOL as STACK_POOL
from hiddenscope.interface.parameters import TARGETS as TARGETS
from hiddenscope.interface.parameters import TEXTS as TEXTS
from hiddenscope.interface.parameters import TRUNCATE as TRUNCATE
from hiddenscope.interface.parameters import Description as Description
from hiddenscope.interface.parameters import Kind as Kind
from hiddenscope.interface.parameters import Parameter as Parameter
