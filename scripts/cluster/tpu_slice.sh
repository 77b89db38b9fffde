#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A slice of TPUs, from a machine with gcloud: the same command on every host of it.
#   TPU=my-slice ZONE=us-east5-b MODEL=... MESH=tensor=16 INPUT=... OUTPUT=... \
#     scripts/cluster/tpu_slice.sh
# The repository is in ~/headrace on the hosts, where `make venv` and
# `.venv/bin/pip install -c constraints.txt 'jax[tpu]'` were run. The hosts tell each other who is
# who. MODEL, INPUT and OUTPUT are on a disk that all of them see, OUTPUT also on the first alone.
set -euo pipefail

command="cd headrace && .venv/bin/python -m scripts.launch generate \
  --model='${MODEL:?}' --mesh='${MESH:?}' --input='${INPUT:?}' --output='${OUTPUT:?}'"
exec gcloud compute tpus tpu-vm ssh "${TPU:?the name of the slice}" --zone="${ZONE:?}" \
  --worker=all --command="$command"
