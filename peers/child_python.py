"""Python processes that run this package's modules, whatever lies in the folder that they are started from.

`python -m` looks for modules in the working folder first: a user's `random.py` or `protocol.py` there would be taken
for the library's, though the parent, which the command `isthmus` started, never looked there.
"""

from __future__ import annotations

import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
# The folder that this package was loaded from: it may be a checkout that is not installed. Where it is, as with
# site-packages, it stands on the path already, behind the standard library.
_RUN = (
    "import runpy, sys; root, module = sys.argv[1:3]; del sys.argv[1:3]; "
    "root in sys.path or sys.path.insert(0, root); runpy.run_module(module, run_name='__main__', alter_sys=True)"
)


def child_python(module: str, *arguments: str) -> list[str]:
    """The command that runs `module` of this package with the parent's own code and libraries."""
    return [sys.executable, "-P", "-c", _RUN, str(_ROOT), module, *arguments]
