// SPDX-License-Identifier: BSD-3-Clause
// streams.cpp: what comes before what.
#include <algorithm>
#include <stdexcept>
#include <utility>

#include "world.h"

namespace fake {

World &world() {
    static World *the_world = new World;
    return *the_world;
}

World::World() {
    streams.push_back({-1, {}, 0});
    for (int device = 0; device < DEVICES; device++)
        streams.push_back({device, {}, 0});
}

void join(Clock *into, const Clock &other) {
    into->resize(std::max(into->size(), other.size()));
    for (size_t i = 0; i < other.size(); i++)
        (*into)[i] = std::max((*into)[i], other[i]);
}

bool happened(const Clock &clock, StreamNumber stream, uint64_t time) {
    return stream < clock.size() && time <= clock[stream];
}

bool is_past(const Clock &clock, const Clock &of) {
    for (size_t i = 0; i < clock.size(); i++)
        if (clock[i] != 0 && !happened(of, i, clock[i]))
            return false;
    return true;
}

uint64_t tick(World &w, StreamNumber stream) {
    Clock &clock = w.streams.at(stream).clock;
    join(&clock, w.host());
    clock.resize(std::max(clock.size(), stream + 1));
    return ++clock[stream];
}

StreamNumber default_stream(int device) {
    return static_cast<StreamNumber>(device) + 1;
}

StreamNumber new_stream(int device) {
    World &w = world();
    const std::lock_guard<std::mutex> guard(w.lock);
    std::vector<StreamNumber> &pool = w.pools[device];
    if (pool.size() < POOL) {
        w.streams.push_back({device, {}, 0});
        pool.push_back(w.streams.size() - 1);
        return pool.back();
    }
    return pool[w.given++ % POOL];
}

int device_of(StreamNumber stream) {
    World &w = world();
    const std::lock_guard<std::mutex> guard(w.lock);
    return w.streams.at(stream).device;
}

std::string name_of(StreamNumber stream) {
    if (stream == HOST)
        return "the host";
    if (stream <= DEVICES)
        return "the default stream of device " + std::to_string(stream - 1);
    return "stream " + std::to_string(stream);
}

void *handle_of(StreamNumber stream) {
    return stream <= DEVICES ? nullptr : reinterpret_cast<void *>(stream << 8);
}

StreamNumber stream_of(const void *handle, int current_device) {
    if (handle == nullptr)
        return default_stream(current_device);
    World &w = world();
    const std::lock_guard<std::mutex> guard(w.lock);
    const uintptr_t bits = reinterpret_cast<uintptr_t>(handle);
    const size_t stream = bits >> 8;
    return bits % 256 == 0 && stream > DEVICES && stream < w.streams.size() ? stream : 0;
}

void record(Event *event, StreamNumber stream) {
    World &w = world();
    const std::lock_guard<std::mutex> guard(w.lock);
    tick(w, stream);
    event->clock = w.streams.at(stream).clock;
    event->capture = w.streams.at(stream).capture;
}

static bool is_being_captured(const World &w, uint64_t graph) {
    return graph != 0 && std::any_of(w.streams.begin(), w.streams.end(),
                                     [&](const Stream &s) { return s.capture == graph; });
}

void wait(StreamNumber stream, const Event &event) {
    World &w = world();
    const std::lock_guard<std::mutex> guard(w.lock);
    join(&w.streams.at(stream).clock, event.clock);
    if (is_being_captured(w, event.capture))
        w.streams[stream].capture = event.capture;
}

void wait_for(StreamNumber stream, StreamNumber other) {
    Event event;
    record(&event, other);
    wait(stream, event);
}

static void refuse_captured(uint64_t capture) {
    if (capture >= FIRST_RECORDED)
        throw std::runtime_error("operation not permitted when stream is capturing");
}

void synchronize(const Event &event) {
    World &w = world();
    const std::lock_guard<std::mutex> guard(w.lock);
    refuse_captured(event.capture);
    join(&w.host(), event.clock);
    make_late(w);
}

void synchronize(StreamNumber stream) {
    World &w = world();
    const std::lock_guard<std::mutex> guard(w.lock);
    refuse_captured(w.streams.at(stream).capture);
    join(&w.host(), w.streams.at(stream).clock);
    make_late(w);
}

void synchronize_device(int device) {
    World &w = world();
    const std::lock_guard<std::mutex> guard(w.lock);
    for (const Stream &stream : w.streams)
        if (stream.device == device)
            join(&w.host(), stream.clock);
    make_late(w);
}

bool is_done(const Event &event) {
    World &w = world();
    const std::lock_guard<std::mutex> guard(w.lock);
    refuse_captured(event.capture);
    return is_past(event.clock, w.host());
}

bool is_done(StreamNumber stream) {
    World &w = world();
    const std::lock_guard<std::mutex> guard(w.lock);
    return is_past(w.streams.at(stream).clock, w.host());
}

static void end_capture(World &w, StreamNumber first) {
    const uint64_t graph = std::exchange(w.streams.at(first).capture, 0);
    for (StreamNumber s = 0; graph != 0 && s < w.streams.size(); s++) {
        if (w.streams[s].capture != graph)
            continue;
        w.streams[s].capture = 0;
        if (w.watching && !happened(w.streams[first].clock, s, w.streams[s].worked))
            w.races.push_back("the capture on " + name_of(first) +
                              " ends, which has not waited for " + name_of(s));
    }
}

void set_capture(StreamNumber stream, uint64_t id) {
    World &w = world();
    const std::lock_guard<std::mutex> guard(w.lock);
    if (id == 0)
        end_capture(w, stream);
    else
        w.streams.at(stream).capture = id;
}

uint64_t capture_of(StreamNumber stream) {
    World &w = world();
    const std::lock_guard<std::mutex> guard(w.lock);
    return w.streams.at(stream).capture;
}

} // namespace fake
