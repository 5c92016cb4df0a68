"""`python -m fastapi_singleton`: the same as the command `fastapi-singleton`."""

import sys

from .cli import main

sys.exit(main())
