/* SPDX-License-Identifier: BSD-3-Clause */
/* fake_device.h: a device with streams for the fake host. It works in the order
 * of the calls, but keeps clocks as if each stream went on its own: what comes
 * before what is known from streams, events and synchronisation alone. Two
 * accesses of the same memory, at least one of them a write, that are not ordered so
 * are a race, and counted. */
#ifndef FAKE_DEVICE_H
#define FAKE_DEVICE_H

#include "fixture.h"

enum { FAKE_STREAMS = 3, FAKE_CLOCKS = FAKE_STREAMS + 1 /* the host's */ };

/* The clock of a stream, an event or the host: how far it knows each stream to be. */
typedef struct fake_clock {
    unsigned at[FAKE_CLOCKS];
} fake_clock;

/* Clocks of all streams, and the last accesses of the memory of a few buffers. */
typedef struct fake_timeline {
    fake_clock streams[FAKE_CLOCKS]; /* the last one: the host */
    struct {
        const void *memory;
        int writer;
        unsigned written;
        unsigned read[FAKE_STREAMS];
    } seen[64];
    size_t n_seen;
    int races;
    char first_race[128];
} fake_timeline;

void fake_timeline_access(fake_timeline *t, int stream, const void *memory, bool write,
                          const char *who);
bool fake_timeline_ordered(const fake_timeline *t, int stream, const void *memory, bool write);
void fake_timeline_wait(fake_timeline *t, int after, int before);

/* The state of the device, and all that it went through. */
typedef struct fake_device {
    fake_timeline timeline;
    int current;                    /* stream of every thread */
    int side;                       /* stream for updates in backward; -1: the current one */
    uint64_t capture[FAKE_STREAMS]; /* graph being captured on a stream */
    bool spoiled;                   /* a capture waited for work outside of it, which ends it */
    bool busy;                      /* no event is ever done by itself */
    int fail_launch;                /* the number of the launch that fails, from 1 */
    bool fails_to_record;           /* no event can be recorded */
    bool fails_to_synchronize;      /* nor waited for by the host */
    int launches;
    int counts; /* of steps on the device */
    int asked;  /* whether an event is done */
    int entries; /* of the last launch */
    int last_stream;
    int waits;
    int synchronized;
    int events; /* alive */
} fake_device;

extern fake_device device;

/* A plan of a host with a device, and parameters on it. */
fixture *setup_on_device(of_mode mode, size_t bucket_bytes);
twin *add_on_device(fixture *f, int64_t numel, size_t group);
void add_some_on_device(fixture *f, size_t n, int64_t numel);
twin *updated_on_device(fixture *f, int64_t numel); /* a new one, by step() */
/* A new one with a gradient, whose scaling by 1 is pending; and a look at that. */
twin *scaled_on_device(fixture *f, int64_t numel);
void look_at_gradient(const twin *t);
void expect_no_race(void);
/* Ends captures, and sees that there was no race and that no event is left. */
void teardown_on_device(fixture *f);
#define ON_DEVICE(name, mode, bucket_bytes)                                                        \
    WITH(name, setup_on_device(mode, bucket_bytes), teardown_on_device)

/* Where an update made now belongs. */
of_stream fake_home(void);

/* This stream waits for stream 0 and is the current one from now on. */
void go_to_stream(int stream);
/* The current stream uses a buffer, as an operator would: accesses it first. */
void fake_operator(fake_buffer *buffer, bool write, const char *name);
void use_there(const twin *t); /* reads its parameter */

#endif
