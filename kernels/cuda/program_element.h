/* SPDX-License-Identifier: BSD-3-Clause */
/* program_element.h: what the operators of programs (operators.def) are made of, as PyTorch's CUDA
 * computes them. In C and on the GPU. */
#ifndef OPTFUSE_CUDA_PROGRAM_ELEMENT_H
#define OPTFUSE_CUDA_PROGRAM_ELEMENT_H

#include "../cpu/stored.h"

#include "../rules/aten_cuda.h"

#include OF_RULE_HEADER

#endif
