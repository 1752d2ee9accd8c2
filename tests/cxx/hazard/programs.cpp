// SPDX-License-Identifier: BSD-3-Clause
// programs.cpp: random training programs with optfuse.hpp, compared by bits with the reference:
//
//   test_cxx hazard [COUNT [FIRST SEED]]
//
// A program runs three times: with the reference in the place of torch::optim's step(), in forward
// mode and in backward mode. In each mode one of these must come of it:
//
//   equal      everything it saw has the bits of the reference, to the end
//   raised     optfuse::Error; what it saw until then is equal
//   exception  another exception, where the reference has one, too
//   address    memory was read by its address, or saved, without flush(), and PyTorch threw
//   outside    backward mode: it looks at weights or state between backward() and step()
//   autograd   backward mode: a graph is needed again whose weights an update has changed
#include "optfuse.hpp"

#include "common.h"
#include "hazard/actions.h"
#include "tests.h"

#include <csignal>
#include <iostream>
#include <map>
#include <unistd.h>

namespace hazard {
namespace {

constexpr unsigned SECONDS = 60; // for a program; more is a hang

struct Program {
    Setup setup;
    std::vector<std::pair<const Action *, Numbers>> actions;
};

struct Run {
    std::vector<std::pair<std::string, Tensor>> seen;
    std::string end = "equal", error;
};

// ---- drawing

struct Draw {
    std::mt19937 engine;
    unsigned below(unsigned n) { return unsigned(engine() % n); }
    Numbers numbers() { return {below(1000), below(1000), below(1000), below(1000)}; }
};

const std::vector<Action> &actions() {
    static const std::vector<Action> all = [] {
        std::vector<Action> found = training_actions();
        for (const auto &more : {changing_actions(), looking_actions()})
            found.insert(found.end(), more.begin(), more.end());
        return found;
    }();
    return all;
}

const Action &draw_action(Draw &draw, bool gentle) {
    unsigned total = 0;
    for (const Action &action : actions())
        total += gentle && !action.gentle ? 0 : action.weight;
    unsigned left = draw.below(total);
    for (const Action &action : actions()) {
        const unsigned weight = gentle && !action.gentle ? 0 : action.weight;
        if (left < weight)
            return action;
        left -= weight;
    }
    return actions().front();
}

// Half of all programs have only what backward mode can run to its end.
Program generate(unsigned seed) {
    Draw draw{std::mt19937(seed)};
    Program program;
    Setup &setup = program.setup;
    for (unsigned n = 1 + draw.below(5); n > 0; n--)
        setup.shapes.push_back(draw.below(1000));
    for (unsigned n = 1 + draw.below(4) / 3; n > 0; n--)
        setup.kinds.push_back(draw.below(unsigned(kinds().size())));
    setup.variant = draw.below(3);
    setup.groups = 1 + draw.below(3) / 2;
    setup.passes = 1 + draw.below(6) / 5;
    const size_t bytes[] = {1, 1, 0, 400};
    setup.bucket_bytes = bytes[draw.below(4)];
    const bool gentle = draw.below(2) == 0;
    program.actions.emplace_back(&actions().front(), Numbers{});
    for (unsigned n = 5 + draw.below(12); n > 0; n--) {
        const Action &action = draw_action(draw, gentle);
        program.actions.emplace_back(&action, draw.numbers());
    }
    return program;
}

// ---- playing

void end_with(Run &run, const World &world, const Action &action, const std::exception &error) {
    const std::string text = error.what();
    run.error = std::string(action.name) + ": " + text.substr(0, text.find('\n'));
    if (world.is_fused() && dynamic_cast<const optfuse::Error *>(&error) != nullptr)
        run.end = "raised";
    else if (world.is_fused() && text.find("Storage that is invalid") != std::string::npos)
        run.end = "address";
    else if (world.in_backward && world.is_unsettled() &&
             text.find("modified by an inplace operation") != std::string::npos)
        run.end = "autograd";
    else
        run.end = "exception";
}

Run play(const Program &program, Play how) {
    Run run;
    std::optional<World> world;
    try {
        world.emplace(program.setup, how);
    } catch (const optfuse::Error &error) {
        return {{}, "raised", error.what()};
    }
    static const Action last = {"at last", 0, false, true,
                                [](World &w, const Numbers &) { w.see_weights_and_state(); }};
    auto todo = program.actions;
    todo.emplace_back(&last, Numbers{});
    for (size_t i = 0; i < todo.size() && run.end == "equal"; i++) {
        const auto &[action, numbers] = todo[i];
        world->label = "action " + std::to_string(i) + ", " + action->name;
        if (world->is_unsettled() && !action->between) {
            run.end = "outside";
            break;
        }
        try {
            action->run(*world, numbers);
        } catch (const std::exception &error) {
            end_with(run, *world, *action, error);
            if (run.end == "exception")
                world->see("exception", Tensor());
        }
    }
    run.seen = std::move(world->seen);
    return run;
}

// The first difference between a run and the reference, or an empty string.
std::string difference(const Run &stock, const Run &run) {
    const size_t n = std::min(stock.seen.size(), run.seen.size());
    for (size_t i = 0; i < n; i++) {
        if (run.seen[i].first != stock.seen[i].first)
            return run.seen[i].first + ", the reference " + stock.seen[i].first + " (" + run.error +
                   stock.error + ")";
        if (!same_bits(run.seen[i].second, stock.seen[i].second))
            return run.seen[i].first + " has other bits";
    }
    const bool is_whole = run.end == "equal" || run.end == "exception";
    if (run.seen.size() > n || (is_whole && stock.seen.size() > n))
        return "one run goes on after '" + (n == 0 ? "" : run.seen[n - 1].first) + "' (" +
               run.error + stock.error + ")";
    return "";
}

using Ends = std::map<std::string, int>;

std::string failure_of(const Program &program, Ends *ends = nullptr) {
    const Run stock = play(program, Play::stock);
    for (const Play how : {Play::forward, Play::backward}) {
        const std::string mode = how == Play::forward ? "forward" : "backward";
        const Run run = play(program, how);
        const std::string found = difference(stock, run);
        if (!found.empty())
            return mode + " mode: " + found;
        if (ends != nullptr)
            (*ends)[mode + ": " + run.end]++;
    }
    return "";
}

// ---- reporting

void shrink(Program &program) {
    for (size_t i = program.actions.size(); i-- > 0;) {
        Program less = program;
        less.actions.erase(less.actions.begin() + int64_t(i));
        if (!failure_of(less).empty())
            program = less;
    }
}

void report(unsigned seed, Program program) {
    shrink(program);
    std::cout << "seed " << seed << ", " << failure_of(program) << "\n";
    const Setup &s = program.setup;
    std::cout << "shapes";
    for (const unsigned shape : s.shapes)
        std::cout << " " << shape % 12;
    std::cout << ", kinds";
    for (const unsigned kind : s.kinds)
        std::cout << " " << kind;
    std::cout << ", variant " << s.variant << ", groups " << s.groups << ", passes " << s.passes
              << ", bucket_bytes " << s.bucket_bytes << "\n";
    for (const auto &[action, n] : program.actions)
        std::cout << "    " << action->name << " " << n[0] << " " << n[1] << " " << n[2] << " "
                  << n[3] << "\n";
    std::cout << std::flush;
}

volatile unsigned playing; // the seed

void crash(int signal) {
    std::cerr << "seed " << playing << (signal == SIGALRM ? " hangs" : " crashed") << std::endl;
    _exit(1);
}

} // namespace

int play_programs(int argc, char **argv) {
    const int count = argc > 1 ? std::stoi(argv[1]) : 500;
    const unsigned first = argc > 2 ? unsigned(std::stoul(argv[2])) : 1;
    at::set_num_threads(1);
    for (const int signal : {SIGSEGV, SIGABRT, SIGBUS, SIGFPE, SIGALRM})
        std::signal(signal, crash);
    Ends ends;
    for (unsigned seed = first; seed < first + unsigned(count); seed++) {
        playing = seed;
        alarm(SECONDS);
        const Program program = generate(seed);
        const std::string failure = failure_of(program, &ends);
        expect(failure.empty(), "seed " + std::to_string(seed) + ", " + failure);
        if (!failure.empty() && failures <= 5)
            report(seed, program);
    }
    for (const auto &[end, n] : ends)
        std::cout << n << " " << end << "\n";
    std::cout << count << " programs, " << failures << " failures" << std::endl;
    return failures == 0 ? 0 : 1;
}

} // namespace hazard
