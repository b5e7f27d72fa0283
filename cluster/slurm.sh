#!/bin/bash --login
#SBATCH --job-name=@@JOB@@
#SBATCH --account=@@ACCOUNT@@
#SBATCH --partition=@@QUEUE@@
#SBATCH --nodes=@@SELECT@@
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --time=@@WALLTIME@@
#SBATCH --no-kill
#SBATCH --signal=B:TERM@60
@@EXTRA@@
# Written by mula-ray submit: @@CONFIG@@ on @@NODES@@ working nodes + @@SPARES@@ spares (site @@SITE@@); job @@INDEX@@ of @@CHAIN@@.

started=$(date +%s)
cd @@PROJECT@@ || exit 20

# Modules and the virtual environment are not written for strict mode, so it comes after them.
@@MODULES@@
@@ACTIVATE@@
set -euo pipefail

@@BODY@@
