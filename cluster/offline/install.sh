#!/usr/bin/env bash
# Installs the environment that pack.sh packed, without a network, and starts Ray in it.
#
#   PARTS/install.sh TARGET
#   export PYTHONPATH=TARGET
set -euo pipefail
parts=$(cd "$(dirname "$0")" && pwd) target=$1
(cd "$parts" && sha256sum --check --quiet SHA256SUMS)
mkdir -p "$target"
cat "$parts"/part-* | tar xJ -C "$target"
PYTHONPATH=$target python3 - "$target" <<'PYTHON'
import importlib, pathlib, sys

packages = sorted(path.parent.name for path in pathlib.Path(sys.argv[1]).glob("[!_]*/__init__.py"))
for name in packages:
    importlib.import_module(name)
print(f"Imported {len(packages)} packages.", flush=True)
if "ray" in packages:
    import ray

    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    assert ray.get(ray.remote(lambda: 42).remote()) == 42
    print(f"Ray {ray.__version__} ran a task.")
PYTHON
