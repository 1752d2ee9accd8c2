/* SPDX-License-Identifier: BSD-3-Clause */
/* core_distance.c: how long a cache line takes from one core to another: some 30 ns where both
 * share a cache, 100 to 300 ns between chiplets or sockets. Gradients and weights make this
 * journey in every iteration, and a virtual machine may move its cores while a benchmark runs. */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdalign.h>
#include <stdatomic.h>
#include <time.h>

static alignas(128) atomic_int ball;

/* On this core, waits for each number and stores the next one. */
static void play(int cpu, int first, int round_trips) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET((size_t)cpu, &set);
    pthread_setaffinity_np(pthread_self(), sizeof set, &set);
    for (int i = 0; i < round_trips; i++) {
        while (atomic_load_explicit(&ball, memory_order_acquire) != 2 * i + first)
            ;
        atomic_store_explicit(&ball, 2 * i + first + 1, memory_order_release);
    }
}

static void *answer(void *cpu_and_trips) {
    const int *of = cpu_and_trips;
    play(of[0], 1, of[1]);
    return NULL;
}

/* Nanoseconds that a line takes one way between two cores, the mean of so many round trips;
 * negative if no thread can be started. The caller is left on cpu_a. Not for two threads. */
__attribute__((visibility("default"))) double core_distance(int cpu_a, int cpu_b, int round_trips);
double core_distance(int cpu_a, int cpu_b, int round_trips) {
    int other[] = {cpu_b, round_trips};
    struct timespec from, to;
    pthread_t thread;
    atomic_store(&ball, 0);
    if (pthread_create(&thread, NULL, answer, other) != 0)
        return -1;
    clock_gettime(CLOCK_MONOTONIC, &from);
    play(cpu_a, 0, round_trips);
    clock_gettime(CLOCK_MONOTONIC, &to);
    pthread_join(thread, NULL);
    const double seconds = (double)(to.tv_sec - from.tv_sec);
    return (1e9 * seconds + (double)(to.tv_nsec - from.tv_nsec)) / (2.0 * round_trips);
}
