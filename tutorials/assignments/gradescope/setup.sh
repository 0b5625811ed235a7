#!/usr/bin/env bash
# Gradescope runs this once, when it builds the image. The repository is in /autograder/source.
set -euo pipefail
cd "${AUTOGRADER:-/autograder}/source"
apt-get update
apt-get install -y python3 python3-pip python3-venv
python3 -m venv venv
venv/bin/pip install torch --index-url https://download.pytorch.org/whl/cpu  # a few gigabytes less than with CUDA
venv/bin/pip install -e .
useradd --no-create-home student  # whom the student's file runs as; it must not read the secret
chmod -R a+rX .
chmod 600 secret.txt
