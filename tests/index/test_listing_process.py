"""What a listing process loads: it starts for every job, before anything else can."""

import subprocess
import sys


def test_listing_loads_no_torch():
    code = (
        "import sys, pipeline.index.listing, pipeline.sources.text;"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
