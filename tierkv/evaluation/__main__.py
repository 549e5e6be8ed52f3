"""`python -m tierkv.evaluation`, for `tierkv eval`."""

import sys

from tierkv.evaluation.process import main

sys.exit(main())
