/* SPDX-License-Identifier: BSD-3-Clause */
/* torch_name.c: a library that has the name of one of torch's and is empty. The shim is linked
 * with it; at run time torch's own is there. */
extern int of_torch_name;
