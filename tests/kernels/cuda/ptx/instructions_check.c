/* SPDX-License-Identifier: BSD-3-Clause */
/* instructions_check.c: each instruction of ptx.h, from PTX's text on, gives what by_hand.h does,
 * on edges of its types and on random numbers. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "arrays.h"
#include "by_hand.h"
#include "machine.h"

_Thread_local host_index host_block_index, host_block_size, host_thread_index;
_Thread_local unsigned host_phase;

enum { RANDOM = 20000 };

#define INSTRUCTION(name, result, A, B, C, value)                                                  \
    void instruction_##name(const void *arguments);                                                \
    static void hand_##name(const void *in, void *out) {                                           \
        A a;                                                                                       \
        B b;                                                                                       \
        C c;                                                                                       \
        memcpy(&a, in, sizeof a);                                                                  \
        memcpy(&b, (const char *)in + 8, sizeof b);                                                \
        memcpy(&c, (const char *)in + 16, sizeof c);                                               \
        (void)a, (void)b, (void)c;                                                                 \
        const result made = (result)(value);                                                       \
        memcpy(out, &made, sizeof made);                                                           \
    }
#include "instructions.def"
#undef INSTRUCTION

typedef struct row {
    const char *name;
    void (*run)(const void *arguments);
    void (*by_hand)(const void *in, void *out);
    const char *result, *types[3];
} row;

static const row rows[] = {
#define INSTRUCTION(name, result, A, B, C, value)                                                  \
    {#name, instruction_##name, hand_##name, #result, {#A, #B, #C}},
#include "instructions.def"
#undef INSTRUCTION
};

static bool is(const char *type, const char *wanted) {
    return strcmp(type, wanted) == 0;
}

static f32 edge_f32(uint64_t number) {
    static const f32 edges[] = {0.0f,       1.0f,        0.5f,      2.5f,           3.5f,
                                1e-45f,     0x1p-126f,   0x1p31f,   0x1.fffffep30f, 0x1.fffffep127f,
                                INFINITY,   NAN,         65519.9f,  65520.0f,       0x1p-25f,
                                0x1.8p-24f, 0x1.ffp127f, 0x1.01p0f, 0x1.03p0f,      0x1.002p0f};
    return number % 2 ? -edges[number / 2 % 20] : edges[number / 2 % 20];
}

/* An operand, in the bytes of a word. Every other is an edge. */
static uint64_t operand(const char *type, uint64_t *random) {
    static const uint64_t edges[] = {0,
                                     1,
                                     15,
                                     16,
                                     17,
                                     31,
                                     32,
                                     33,
                                     63,
                                     64,
                                     65,
                                     255,
                                     256,
                                     32767,
                                     32768,
                                     65535,
                                     0x7fffffff,
                                     0x80000000,
                                     0xffffffff,
                                     0x7fffffffffffffff,
                                     0x8000000000000000,
                                     0xffffffffffffffff};
    const uint64_t number = random_next(random), edge = random_next(random) % 2;
    uint64_t word = edge ? edges[number % 22] : number;
    const f32 single = edge_f32(number);
    const f64 wide =
        edge ? (f64)single : ldexp(random_real(random) * 2 - 1, (int)(number % 80) - 40);
    if (is(type, "pred"))
        return number & 1;
    if (is(type, "f32") && edge)
        memcpy(&word, &single, sizeof single);
    else if (is(type, "f32") && number >> 32 & 1) {
        const f32 some = (f32)wide;
        memcpy(&word, &some, sizeof some);
    } else if (is(type, "f64") && (edge || number & 1))
        memcpy(&word, &wide, sizeof wide);
    return word;
}

static bool same(const char *type, uint64_t have, uint64_t want) {
    f32 a, b;
    f64 c, d;
    memcpy(&a, &have, sizeof a);
    memcpy(&b, &want, sizeof b);
    memcpy(&c, &have, sizeof c);
    memcpy(&d, &want, sizeof d);
    return have == want || (is(type, "f32") && isnan(a) && isnan(b)) ||
           (is(type, "f64") && isnan(c) && isnan(d));
}

static int check(const row *one, uint64_t random) {
    for (int i = 0; i < RANDOM; i++) {
        uint64_t memory[4] = {0}, want = 0;
        const uint64_t *arguments[] = {memory, memory + 1};
        for (int k = 0; k < 3; k++)
            memory[k + 1] = operand(one->types[k], &random);
        ptx_alone(one->name, arguments, sizeof arguments, memory, sizeof memory);
        one->run(arguments);
        one->by_hand(memory + 1, &want);
        if (same(one->result, memory[0], want))
            continue;
        printf("FAIL %s of %#llx, %#llx, %#llx: %#llx, by hand %#llx\n", one->name,
               (unsigned long long)memory[1], (unsigned long long)memory[2],
               (unsigned long long)memory[3], (unsigned long long)memory[0],
               (unsigned long long)want);
        return 1;
    }
    return 0;
}

int main(void) {
    int failures = 0;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        failures += check(&rows[i], i + 1);
    printf("%zu instructions, %d fail\n", sizeof rows / sizeof *rows, failures);
    return failures ? EXIT_FAILURE : EXIT_SUCCESS;
}
