/* SPDX-License-Identifier: BSD-3-Clause */
/* core_distance.c: how long a cache line takes from one core to another.
 *
 * A line that one thread wrote and another one reads travels between their
 * cores: some 30 ns where they share a cache, 100 ns and more between the chips
 * of a package, 300 ns between sockets. The gradients and weights of training
 * on several threads make this journey all the time. A virtual machine may be
 * moved from the first to the last case, and back, while a benchmark runs. */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdalign.h>
#include <stdatomic.h>
#include <time.h>

static alignas(128) atomic_int ball;

typedef struct player {
    int cpu;
    int round_trips;
} player;

static void stay_on(int cpu) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET((size_t)cpu, &set);
    pthread_setaffinity_np(pthread_self(), sizeof set, &set);
}

/* Returns the ball each time it is odd. */
static void *answer(void *arg) {
    const player *self = arg;
    stay_on(self->cpu);
    for (int i = 0; i < self->round_trips; i++) {
        while (atomic_load_explicit(&ball, memory_order_acquire) != 2 * i + 1)
            ;
        atomic_store_explicit(&ball, 2 * i + 2, memory_order_release);
    }
    return NULL;
}

static double now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return 1e9 * (double)t.tv_sec + (double)t.tv_nsec;
}

static double serve(int round_trips) {
    double start = now_ns();
    for (int i = 0; i < round_trips; i++) {
        atomic_store_explicit(&ball, 2 * i + 1, memory_order_release);
        while (atomic_load_explicit(&ball, memory_order_acquire) != 2 * i + 2)
            ;
    }
    return (now_ns() - start) / (2.0 * round_trips);
}

/* Nanoseconds a line takes one way between two cores, the mean over so many
 * round trips; negative if a thread can't be had. The caller runs on cpu_a
 * meanwhile. Not for two threads at once. */
__attribute__((visibility("default"))) double core_distance(int cpu_a, int cpu_b, int round_trips);
double core_distance(int cpu_a, int cpu_b, int round_trips) {
    player other = {cpu_b, round_trips};
    pthread_t thread;
    cpu_set_t before;
    pthread_getaffinity_np(pthread_self(), sizeof before, &before);
    atomic_store(&ball, 0);
    if (pthread_create(&thread, NULL, answer, &other) != 0)
        return -1;
    stay_on(cpu_a);
    double ns = serve(round_trips);
    pthread_join(thread, NULL);
    pthread_setaffinity_np(pthread_self(), sizeof before, &before);
    return ns;
}
