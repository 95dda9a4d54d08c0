"""Shared by all tests. That this file is here puts `tests/` on the path: `import ref` works.

Property tests draw the same examples in every run, so that a commit passes or fails for good;
HYPOTHESIS_PROFILE=explore draws new ones.
"""

from __future__ import annotations

import os
import signal

from hypothesis import settings

settings.register_profile("repeat", derandomize=True, deadline=None)
settings.register_profile("explore", deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeat"))

# Shells let what they start in the background ignore Ctrl-C, and so would all that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
