#!/bin/sh
# Prints the extra of this package that brings the right JAX: cuda13, cuda12, or nothing for a CPU.
# CUDA 13 needs driver 580 or newer; CUDA 12 builds run on older ones.
set -u
version=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1)
case "$version" in
    [0-9]*) ;;
    *) version=$(grep -Eo '[0-9]{3}\.[0-9.]+' /proc/driver/nvidia/version 2>/dev/null | head -n 1) ;; # no nvidia-smi
esac
major=${version%%.*}
case "$major" in
    '' | *[!0-9]*) ;;
    *) if [ "$major" -ge 580 ]; then echo cuda13; else echo cuda12; fi ;;
esac
