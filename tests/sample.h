/* SPDX-License-Identifier: BSD-3-Clause */
/* sample.h: under sanitizers, which look at memory and not at numbers, a test draws a tenth of its
 * random cases; all of them by tests/run --full. */
#ifndef OPTFUSE_TEST_SAMPLE_H
#define OPTFUSE_TEST_SAMPLE_H

#ifdef OF_TEST_SAMPLE
#define DRAWN(cases) ((cases) / 10)
#else
#define DRAWN(cases) (cases)
#endif

#endif
