#!/usr/bin/env bash
# Gradescope runs this once, when it builds the image. The repository is in /autograder/source.
set -euo pipefail
root="${AUTOGRADER:-/autograder}"
cd "$root/source"
apt-get update
apt-get install -y python3 python3-pip python3-venv
python3 -m venv "$root/venv"
"$root/venv/bin/pip" install torch --index-url https://download.pytorch.org/whl/cpu  # gigabytes less than with CUDA
"$root/venv/bin/pip" install -e .
