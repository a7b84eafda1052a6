#!/usr/bin/env bash
# The wheel and the sdist as somebody gets them: what twine thinks of them, their sizes, and the first commands of
# docs/install.md in an environment that has nothing else: no checkout, no compiler, no network for inlay, an empty home.
#
#     scripts/check_wheel.sh [PYTHON]      # WHEELS=<folder> keeps what was built; LIMIT=<bytes>
#
# `build` and `twine` are taken from $TOOLS (a folder with their commands), or installed into an environment of their own.
set -euo pipefail
cd "$(dirname "$0")/.."
python="${1:-python3}"
limit="${LIMIT:-$((12 * 1024 * 1024))}"
scratch="$(mktemp -d)"
trap 'rm -rf "$scratch"' EXIT
made="${WHEELS:-$scratch/dist}"
export PIP_CONSTRAINT="$PWD/constraints.txt" PIP_QUIET=1 PIP_NO_COMPILE=1 PIP_DISABLE_PIP_VERSION_CHECK=1

if [ -z "${TOOLS:-}" ]; then
  "$python" -m venv "$scratch/tools"
  TOOLS="$scratch/tools/bin"
  "$TOOLS/pip" install build twine
fi
mkdir -p "$made"
rm -f "$made"/inlay-*
# The sdist first, and the wheel from it: what is missing from the one is missing from the other.
"$TOOLS/python" -m build --outdir "$made" . > "$scratch/build.log" 2>&1 || { cat "$scratch/build.log"; exit 1; }
"$TOOLS/python" -m twine check --strict "$made"/inlay-*
wheel="$(ls "$made"/inlay-*.whl)"
for file in "$made"/inlay-*; do
  bytes="$(wc -c < "$file")"
  echo "$(basename "$file"): $bytes bytes"
  [ "$bytes" -le "$limit" ] || { echo "$file is larger than $limit bytes"; exit 1; }
done

"$python" -m venv "$scratch/bare"
"$scratch/bare/bin/pip" install "$wheel"
mkdir "$scratch/home" "$scratch/work"
cd "$scratch/work"
# Only its own commands are on the path: no compiler, no git, no make.
bare() {
  env -i HOME="$scratch/home" PATH="$scratch/bare/bin" LANG=C.UTF-8 OMP_NUM_THREADS="${OMP_NUM_THREADS:-2}" \
    HF_HUB_OFFLINE=1 "$@"
}
bare inlay doctor
bare inlay compare --model embedded:vit --task digits --methods linear-probe,bias --seeds 1 --max-steps 20 --out first
for file in report.html comparison.json comparison.csv; do
  [ -s "first/$file" ] || { echo "no first/$file"; exit 1; }
done
echo "the wheel works on $("$scratch/bare/bin/python" --version)"
