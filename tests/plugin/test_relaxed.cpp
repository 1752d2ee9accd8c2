// SPDX-License-Identifier: BSD-3-Clause
// test_relaxed.cpp: the bodies of plugin/lock_free.h under C11's memory model, as a processor with
// a weak order may run them. Relacy plays the threads: it tries interleavings, lets a load return
// each value that the model allows, and reports data races and what RL_ASSERT finds. With orders
// as they are written no suite may fail; each order that is made weaker must fail one.
#include <array>
#include <cstdio>
#include <cstring>
#include <ostream>
#include <type_traits>
#include <vector>

#include <relacy/relacy.hpp> // the last: it makes macros of words of C++

// C's atomics in Relacy's words. Each order is a variable, so that main() can weaken it.
static rl::memory_order relaxed_order, acquire_order, release_order, both_order;
#define memory_order_relaxed relaxed_order
#define memory_order_acquire acquire_order
#define memory_order_release release_order
#define memory_order_acq_rel both_order
#define atomic_load_explicit(at, order) ((at)->load(order, $))
#define atomic_store_explicit(at, value, order) ((at)->store(value, order, $))
#define atomic_exchange_explicit(at, value, order) ((at)->exchange(value, order, $))
#define atomic_fetch_add_explicit(at, value, order) ((at)->fetch_add(value, order, $))
#define atomic_fetch_sub_explicit(at, value, order) ((at)->fetch_sub(value, order, $))
#define atomic_compare_exchange_weak_explicit(at, expected, value, order, failed)                  \
    ((at)->compare_exchange_weak(*(expected), value, order, $, failed, $))
#define _Atomic(type) rl::atomic<type>
using atomic_size_t = rl::atomic<size_t>;
using atomic_bool = rl::atomic<bool>;

// A plain variable whose every use Relacy sees.
template <typename T> struct Plain {
    rl::var<T> seen;
    Plain &operator=(T value) {
        seen($) = value;
        return *this;
    }
    operator T() const { return seen($); }
};

struct of_link {
    Plain<of_link *> next;
    Plain<int> written;
};

// membarrier(2): a full fence in the thread that asks for it, and in each other one wherever that
// one is; here between its loads, the one place where it matters. relaxed: none.
static rl::memory_order fence_order;
static bool system_refuses;
static bool fence_before_seals, fence_before_marks; // as update.c has them

static void fence() {
    if (!system_refuses && fence_order != rl::mo_relaxed)
        rl::atomic_thread_fence(fence_order, $);
}

static bool of_fence_all() {
    fence();
    return !system_refuses;
}

#define OF_MODEL_CHECKED
#include "lock_free.h"

namespace {

// Variables that threads write, and a count of these threads.
template <unsigned N> struct Written {
    atomic_size_t count;
    std::array<Plain<int>, N> memory;

    void begin(size_t counted) {
        count.store(counted, rl::mo_relaxed, $);
        for (auto &one : memory)
            one = 0;
    }
    bool is_all_written() {
        bool all = true;
        for (auto &one : memory)
            all = all && one == 1;
        return all;
    }
    // Writes again all that it has read, as whoever frees it does.
    void take_all() {
        RL_ASSERT(is_all_written());
        for (auto &one : memory)
            one = 2;
    }
};

// Threads 0 and 1 each write and count down; a third counts up and down between. Who then reads 0
// reads what both have written.
struct Count : rl::test_suite<Count, 4>, Written<2> {
    void before() { begin(2); }
    void thread(unsigned i) {
        if (i < 2) {
            memory[i] = 1;
            of_count_change(&count, -1);
        } else if (i == 2) {
            of_count_change(&count, 1);
            of_count_change(&count, -1);
        } else if (of_count_is_zero(&count)) {
            RL_ASSERT(is_all_written());
        }
    }
};

// Each thread writes what it shares, then gives its reference back; the last one frees it.
struct References : rl::test_suite<References, 3>, Written<3> {
    void before() { begin(3); }
    void thread(unsigned i) {
        of_retain(&count);
        memory[i] = 1;
        for (int given = 0; given < 2; given++)
            if (of_was_last(&count))
                take_all();
    }
};

// A thread without a reference tries to get one under the lock that also frees.
struct Retain : rl::test_suite<Retain, 3> {
    rl::mutex lock;
    atomic_size_t refs;
    Plain<int> is_there, memory;

    void before() {
        refs.store(1, rl::mo_relaxed, $);
        is_there = 1;
        memory = 0;
    }
    void give_back() {
        if (!of_was_last(&refs))
            return;
        lock.lock($);
        is_there = 0;
        lock.unlock($);
        memory = -1;
    }
    void thread(unsigned i) {
        if (i == 0) {
            memory = 1;
            give_back();
            return;
        }
        lock.lock($);
        const bool mine = is_there == 1 && of_try_retain(&refs);
        lock.unlock($);
        if (!mine)
            return;
        RL_ASSERT(refs.load(rl::mo_relaxed, $) > 0);
        give_back();
    }
};

// Two holders of a record, of whom the last pushes it onto the stack.
struct Holders : rl::test_suite<Holders, 2>, Written<2> {
    void before() { begin(2); }
    void thread(unsigned i) {
        memory[i] = 1;
        if (of_last_lets_go(&count))
            RL_ASSERT(is_all_written());
    }
};

// A slot keeps its record, which a list and a queue hold, too. The slot takes it again when they
// have let go of it.
struct Kept : rl::test_suite<Kept, 3>, Written<2> {
    void before() { begin(3); }
    void thread(unsigned i) {
        if (i < 2) {
            memory[i] = 1;
            RL_ASSERT(!of_last_lets_go(&count));
        } else if (of_hold_alone(&count)) {
            take_all();
            RL_ASSERT(!of_last_lets_go(&count));
        }
    }
    void after() { RL_ASSERT(count.load(rl::mo_relaxed, $) == 1); }
};

// Three threads push, one of them after it has emptied the stack; nothing is lost, and each record
// is as it was pushed.
struct Stack : rl::test_suite<Stack, 3> {
    rl::atomic<of_link *> stack;
    std::array<of_link, 4> records;
    Plain<int> n_taken;

    void before() {
        stack.store(nullptr, rl::mo_relaxed, $);
        n_taken = 0;
    }
    void take() {
        for (of_link *one = of_stack_take(&stack); one;) {
            of_link *next = one->next;
            RL_ASSERT(one->written == 1);
            one->written = 2;
            n_taken = n_taken + 1;
            one = next;
        }
    }
    void push(unsigned i) {
        records[i].written = 1;
        of_stack_push(&stack, &records[i]);
    }
    void thread(unsigned i) {
        push(i);
        if (i == 2) {
            take();
            push(3);
        }
    }
    void after() {
        take();
        RL_ASSERT(n_taken == 4);
    }
};

// Thread 0 launches an update and takes its seal and its mark off. Thread 1, which trains, too,
// meets the mark, finds nothing pending and takes it off. Thread 2 has synchronized with neither
// and reads the mark as PyTorch's dispatcher does, then the seal and the memory: without a mark, or
// when nothing is pending. Thread 3 has an alias without a mark, so that it reads the seal, then the
// memory; where the system refuses fences nothing orders these.
struct Marks : rl::test_suite<Marks, 4> {
    rl::atomic<bool> mark, seal;
    atomic_size_t pending;
    atomic_bool kept;
    rl::atomic<int> memory; // its bytes are read by plain loads, which tear no number

    void before() {
        mark.store(true, rl::mo_relaxed, $);
        seal.store(true, rl::mo_relaxed, $);
        pending.store(1, rl::mo_relaxed, $);
        kept.store(false, rl::mo_relaxed, $);
        memory.store(0, rl::mo_relaxed, $);
    }
    void take_off() {
        if (!of_are_kept(&kept))
            mark.store(false, rl::mo_relaxed, $);
    }
    void launch() {
        memory.store(1, rl::mo_relaxed, $);
        if (fence_before_seals)
            of_order_or_keep(&kept);
        seal.store(false, rl::mo_relaxed, $);
        if (fence_before_marks)
            of_order_or_keep(&kept);
        take_off();
        of_count_change(&pending, -1);
    }
    void use(bool trains) {
        const bool is_marked = mark.load(rl::mo_relaxed, $);
        if (!trains)
            fence();
        if (is_marked && !of_count_is_zero(&pending))
            return; // waits for the update's lock
        if (trains)
            take_off();
        else
            RL_ASSERT(!seal.load(rl::mo_relaxed, $) && memory.load(rl::mo_relaxed, $) == 1);
    }
    void use_alias() {
        const bool is_sealed = seal.load(rl::mo_relaxed, $);
        fence();
        RL_ASSERT(is_sealed || system_refuses || memory.load(rl::mo_relaxed, $) == 1);
    }
    void thread(unsigned i) {
        if (i == 0)
            launch();
        else if (i == 3)
            use_alias();
        else
            use(i == 1);
    }
};

struct MarksWithoutFence : Marks {};

template <typename Suite> bool holds() {
    system_refuses = std::is_same_v<Suite, MarksWithoutFence>;
    rl::test_params params;
    params.search_type = rl::sched_random;
    params.iteration_count = 20000;
    std::ostream unread(nullptr);
    params.output_stream = params.progress_stream = &unread;
    const bool passed = rl::simulate<Suite>(params);
    return passed;
}

struct Named {
    const char *name;
    bool (*holds)();
};
const Named SUITES[] = {
    {"count", holds<Count>},   {"references", holds<References>},
    {"retain", holds<Retain>}, {"holders", holds<Holders>},
    {"kept", holds<Kept>},     {"stack", holds<Stack>},
    {"marks", holds<Marks>},   {"kept marks", holds<MarksWithoutFence>},
};

void orders_as_written() {
    relaxed_order = rl::mo_relaxed;
    acquire_order = rl::mo_acquire;
    release_order = rl::mo_release;
    both_order = rl::mo_acq_rel;
    fence_order = rl::mo_seq_cst;
    fence_before_seals = fence_before_marks = true;
}

// The names of the suites that fail.
std::vector<const char *> failing() {
    std::vector<const char *> found;
    for (const Named &suite : SUITES)
        if (!suite.holds())
            found.push_back(suite.name);
    return found;
}

struct Weakened {
    const char *what;
    void (*weaken)();
    std::vector<const char *> must_fail;
};

bool is_found(const Weakened &one) {
    orders_as_written();
    one.weaken();
    const auto found = failing();
    std::printf("%s:", one.what);
    for (const char *name : found)
        std::printf(" %s", name);
    std::puts(found.empty() ? " nothing fails" : " fail");
    for (const char *name : one.must_fail) {
        bool is_in = false;
        for (const char *other : found)
            is_in = is_in || std::strcmp(name, other) == 0;
        if (!is_in) {
            std::printf("    %s should\n", name);
            return false;
        }
    }
    return true;
}

} // namespace

int main() {
    orders_as_written();
    const auto wrong = failing();
    for (const char *name : wrong)
        std::printf("%s fails with orders as they are written\n", name);
    bool all = wrong.empty();
    const Weakened weakened[] = {
        {"acquire made relaxed",
         [] { acquire_order = rl::mo_relaxed; },
         {"count", "holders", "kept", "stack", "marks", "kept marks"}},
        {"release made relaxed",
         [] { release_order = rl::mo_relaxed; },
         {"count", "stack", "kept marks"}},
        {"no fence in other threads", [] { fence_order = rl::mo_relaxed; }, {"marks"}},
        {"no fence before seals go", [] { fence_before_seals = false; }, {"marks"}},
        {"no fence before marks go", [] { fence_before_marks = false; }, {"marks"}},
        {"acq_rel made acquire",
         [] { both_order = rl::mo_acquire; },
         {"references", "retain", "holders", "kept"}},
        {"acq_rel made release",
         [] { both_order = rl::mo_release; },
         {"references", "retain", "holders"}},
    };
    for (const Weakened &one : weakened)
        all = is_found(one) && all;
    return all ? 0 : 1;
}
