#!/usr/bin/env bash
# Packs the locked environment for Linux machines without a network, where install.sh unpacks it.
#
#   cluster/offline/pack.sh OUT EXTRA...      # OUT/part-00, OUT/part-01, ..., OUT/SHA256SUMS
#   PYTHON=3.12 PART_MB=20 WITHOUT="torch triton" EXCLUDE="ray/jars" cluster/offline/pack.sh ...
#
# WITHOUT has patterns of packages that the machines have (such as "torch nvidia-.*"); EXCLUDE names paths that they do not need.
set -euo pipefail
out=$1; shift
root=$(cd "$(dirname "$0")/../.." && pwd)
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
mkdir -p "$out"
python=${PYTHON:-3.12}
uv export --project "$root" --frozen --no-hashes --no-emit-project --no-annotate --no-header \
    --python "$python" ${*/#/--extra } > "$work/locked.txt"
names=$(tr ' ' '|' <<< "${WITHOUT:-}")
grep -v -E -i "^(${names:-none-of-them})==" "$work/locked.txt" > "$work/needed.txt"
uv pip install --quiet --no-deps --only-binary :all: --python-version "$python" \
    --python-platform x86_64-manylinux_2_28 --target "$work/site" -r "$work/needed.txt"
echo "Compressing $(du -sm "$work/site" | cut -f1) MB."
tar c -C "$work/site" ${EXCLUDE:+$(printf -- '--exclude=%s ' $EXCLUDE)} . | xz -T0 -6 |
    split -b "${PART_MB:-20}M" -d - "$out/part-"
(cd "$out" && sha256sum part-* > SHA256SUMS)
cp "$root/cluster/offline/install.sh" "$out"
