"""Build mla_ops; the logic is in build_tools, everything declarative in pyproject.toml."""

import sys
from pathlib import Path

import setuptools

# Builds without isolation use the setuptools that is there; an old one dies on pyproject.toml's
# licence field without saying what to do.
if int(setuptools.__version__.split(".")[0]) < 77:
    sys.exit(
        f"mla_ops needs setuptools 77 or newer, got {setuptools.__version__}. Run:\n"
        "    pip install 'setuptools>=77' && pip install --no-build-isolation ."
    )

sys.path.insert(0, str(Path(__file__).resolve().parent))
from build_tools.extension import setup_arguments  # noqa: E402

setuptools.setup(**setup_arguments())
