#!/bin/bash --login
#PBS -N @@JOB@@
#PBS -A @@ACCOUNT@@
#PBS -q @@QUEUE@@
#PBS -l select=@@SELECT@@
#PBS -l place=scatter
#PBS -l walltime=@@WALLTIME@@
#PBS -k doe
@@EXTRA@@
# Written by mula-ray submit: @@CONFIG@@ on @@NODES@@ working nodes + @@SPARES@@ spares (site @@SITE@@); job @@INDEX@@ of @@CHAIN@@.

started=$(date +%s)
cd @@PROJECT@@ || exit 20

# Modules and the virtual environment are not written for strict mode, so it comes after them.
@@MODULES@@
@@ACTIVATE@@
set -euo pipefail

@@BODY@@
