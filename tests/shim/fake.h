/* SPDX-License-Identifier: BSD-3-Clause */
/* fake.h: what the fake libraries and their test share. */
#ifndef OPTFUSE_TEST_FAKE_H
#define OPTFUSE_TEST_FAKE_H

#include <stdint.h>

#define FAKE_API __attribute__((visibility("default")))
#define FAKE_HANDLE ((void *)0x1234)

/* In each fake cuBLAS: its number, once it has multiplied. */
extern FAKE_API int fake_called;

#endif
