// SPDX-License-Identifier: BSD-3-Clause
// replay.cpp: the operators of a step() on stand-ins. While they are learned, each is noted with
// its arguments and results, and Python puts it on the tape. While they are played, an operator
// gets the results that it had, if it is the one that was noted, with the same stand-ins; the
// numbers among its arguments are collected. Those that decide what is on the tape must be as they
// were.
#include "traced/replay.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "compat.h"
#include "error.h"
#include "guard.h"
#include "shim.h"

namespace optfuse {
namespace {

enum class TokenKind : unsigned char { STANDIN, BOOL, INT, DOUBLE, NOTHING, TEXT, DEVICE, LIST };

// Part of an argument. Lists come with their length, then their elements.
struct Token {
    TokenKind kind;
    int64_t bits;          // a stand-in's address, a number's bits, a length
    std::string text = {}; // of a number that is a tensor: its dtype

    bool is_number() const { return kind >= TokenKind::BOOL && kind <= TokenKind::DOUBLE; }
    double value() const {
        double x = static_cast<double>(bits);
        if (kind == TokenKind::DOUBLE)
            std::memcpy(&x, &bits, sizeof x);
        return x;
    }
};

Token token_of(double x) {
    int64_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return Token{TokenKind::DOUBLE, bits};
}

struct Noted {
    c10::OperatorHandle op;
    c10::impl::LocalDispatchKeySet modes; // of the thread
    bool with_grad;                       // by the thread's mode
    std::vector<Token> tokens;
    std::vector<size_t> numbers; // of each token its place among all numbers, if it is one
    torch::jit::Stack results;
    std::vector<std::pair<size_t, size_t>> places; // of its numbers: argument, element
};

struct Replay {
    std::vector<Noted> calls;
    std::vector<char> is_free; // of each number: it may be another one
    std::vector<double> values;
    std::vector<std::pair<c10::TensorImpl *, size_t>> counts; // how often results are referred to
    std::vector<const c10::TensorImpl *> standins; // kept alive by Python, or among the results
    size_t next = 0;
    unsigned depth = 0; // of operators that others call
    bool learns = false, failed = false;
};

thread_local Replay *running = nullptr;

bool is_standin(const c10::TensorImpl *impl) {
    const auto &all = running->standins;
    return std::find(all.begin(), all.end(), impl) != all.end();
}

void take_for_standin(Replay *replay, const at::Tensor &tensor) {
    mark(tensor.unsafeGetTensorImpl());
    replay->standins.push_back(tensor.unsafeGetTensorImpl());
}

// A tensor without dimensions that has data: a number for an operator, which PyTorch has made a
// tensor of, or step().
bool number_in(const at::Tensor &tensor, Token *token) {
    const bool is_wrapped = tensor.unsafeGetTensorImpl()->is_wrapped_number();
    if (!tensor.is_cpu() || tensor.key_set().has(c10::DispatchKey::Python) || tensor.dim() != 0 ||
        tensor.layout() != at::kStrided || tensor.requires_grad() || tensor.is_complex())
        return false;
    const at::Scalar value = tensor.item();
    if (value.isFloatingPoint())
        *token = token_of(value.toDouble());
    else if (value.isBoolean())
        *token = Token{TokenKind::BOOL, value.toBool()};
    else
        *token = Token{TokenKind::INT, value.toLong()};
    if (!is_wrapped)
        token->text = c10::toString(tensor.scalar_type());
    return true;
}

// With gradients on, results depend on whether it requires one.
Token token_of_standin(const at::Tensor &tensor) {
    const auto address = reinterpret_cast<int64_t>(tensor.unsafeGetTensorImpl());
    const bool is_followed = c10::GradMode::is_enabled() && tensor.requires_grad();
    return Token{TokenKind::STANDIN, address | static_cast<int64_t>(is_followed)};
}

// To take(token, element), until it returns false. False also for what has no token.
template <typename Take>
bool each_token(const c10::IValue &value, size_t element, const Take &take) {
    if (value.isTensor()) {
        const at::Tensor &tensor = value.toTensor();
        Token token = {TokenKind::NOTHING, 0};
        if (tensor.defined() && is_standin(tensor.unsafeGetTensorImpl()))
            token = token_of_standin(tensor);
        else if (tensor.defined() && !number_in(tensor, &token))
            return false;
        return take(token, element);
    }
    if (value.isNone())
        return take(Token{TokenKind::NOTHING, 0}, element);
    if (value.isDouble())
        return take(token_of(value.toDouble()), element);
    if (value.isInt())
        return take(Token{TokenKind::INT, value.toInt()}, element);
    if (value.isBool())
        return take(Token{TokenKind::BOOL, value.toBool()}, element);
    if (value.isString())
        return take(Token{TokenKind::TEXT, 0, value.toStringRef()}, element);
    if (value.isDevice()) {
        const c10::Device device = value.toDevice();
        const auto type = static_cast<int64_t>(device.type());
        return take(Token{TokenKind::DEVICE, type << 8 | (device.index() & 0xff)}, element);
    }
    if (!value.isList())
        return false;
    const auto elements = value.toListRef();
    if (!take(Token{TokenKind::LIST, static_cast<int64_t>(elements.size())}, element))
        return false;
    for (size_t i = 0; i < elements.size(); i++)
        if (!each_token(elements[i], i, take))
            return false;
    return true;
}

bool has_standins(const c10::OperatorHandle &op, const torch::jit::Stack &stack) {
    bool found = false;
    for (const c10::IValue &value : torch::jit::last(stack, op.schema().arguments().size()))
        each_token(value, 0, [&found](const Token &token, size_t) {
            found |= token.kind == TokenKind::STANDIN;
            return true;
        });
    return found;
}

bool same_modes(const c10::impl::LocalDispatchKeySet &a, const c10::impl::LocalDispatchKeySet &b) {
    return a.included_ == b.included_ && a.excluded_ == b.excluded_;
}

// An operator without stand-ins among its arguments is no part of the replay.
bool give_up(Replay *replay, const c10::OperatorHandle &op, const torch::jit::Stack &stack) {
    if (!has_standins(op, stack))
        return false;
    replay->failed = true;
    const char *name = op.schema().operator_name().name.c_str();
    fail(std::string("optfuse: ") + name + ": this step() is not the one of before");
}

// Marks and keeps the stand-ins among the results, so that a replay can give them again.
bool keep_results(Replay *replay, torch::jit::Stack *stack) {
    Noted &noted = replay->calls.back();
    const size_t n = noted.op.schema().returns().size();
    const auto results = torch::jit::last(*stack, n);
    noted.results.assign(results.begin(), results.end());
    const auto keep = [replay, &noted](const at::Tensor &tensor) {
        if (!tensor.defined() || !tensor.key_set().has(c10::DispatchKey::Python) ||
            (noted.with_grad && tensor.requires_grad()))
            return false;
        take_for_standin(replay, tensor);
        return true;
    };
    for (const c10::IValue &value : noted.results) {
        if (value.isDouble()) // stands for a value: Tape.lend()
            continue;
        if (value.isTensor() ? !keep(value.toTensor()) : !value.isTensorList())
            return false;
        if (value.isTensorList())
            for (const at::Tensor &tensor : value.toTensorVector())
                if (!keep(tensor))
                    return false;
    }
    return true;
}

// The operator is noted, and passed on as ever, which takes the marks off.
bool learn(Replay *replay, const c10::OperatorHandle &op, c10::DispatchKeySet keys,
           torch::jit::Stack *stack, PassOn pass_on) {
    if (replay->depth != 0 || !has_standins(op, *stack))
        return false;
    const bool with_grad = c10::GradMode::is_enabled();
    Noted noted{op, c10::impl::tls_local_dispatch_key_set(), with_grad, {}, {}, {}, {}};
    const size_t n = op.schema().arguments().size();
    for (size_t i = 0; i < n; i++)
        replay->failed |=
            !each_token(torch::jit::peek(*stack, i, n), 0, [&](const Token &token, size_t element) {
                noted.numbers.push_back(replay->values.size());
                if (token.is_number()) {
                    noted.places.emplace_back(i, element);
                    replay->values.push_back(token.value());
                }
                noted.tokens.push_back(token);
                return true;
            });
    replay->calls.push_back(std::move(noted));
    replay->depth = 1;
    try {
        pass_on(op, keys, stack);
    } catch (...) {
        replay->depth = 0;
        replay->failed = true;
        throw;
    }
    replay->depth = 0;
    replay->failed |= !keep_results(replay, stack);
    for (const c10::TensorImpl *standin : replay->standins)
        mark(const_cast<c10::TensorImpl *>(standin));
    return true;
}

// A script may catch the error; then the replay has failed all the same.
bool play(Replay *replay, const c10::OperatorHandle &op, torch::jit::Stack *stack) {
    if (replay->failed || replay->next == replay->calls.size())
        return give_up(replay, op, *stack);
    const Noted &noted = replay->calls[replay->next];
    const size_t n = op.schema().arguments().size();
    if (!(op == noted.op) || c10::GradMode::is_enabled() != noted.with_grad ||
        !same_modes(noted.modes, c10::impl::tls_local_dispatch_key_set()))
        return give_up(replay, op, *stack);
    size_t at = 0;
    const auto is_next = [&](const Token &token, size_t) {
        if (at == noted.tokens.size() || token.kind != noted.tokens[at].kind)
            return false;
        const size_t number = noted.numbers[at];
        const Token &known = noted.tokens[at++];
        if (token.is_number() && replay->is_free[number] != 0 && token.text == known.text) {
            replay->values[number] = token.value();
            return true;
        }
        return (token.bits == known.bits && token.text == known.text) || !OF_GUARD(replay);
    };
    for (size_t i = 0; i < n; i++)
        if (!each_token(torch::jit::peek(*stack, i, n), 0, is_next))
            return give_up(replay, op, *stack);
    if (at != noted.tokens.size())
        return give_up(replay, op, *stack);
    replay->next++;
    torch::jit::drop(*stack, n);
    stack->insert(stack->end(), noted.results.begin(), noted.results.end());
    return true;
}

// Counts of references to what the replay keeps, beside its own.
std::vector<std::pair<c10::TensorImpl *, size_t>> counts_of(const Replay *replay) {
    std::vector<std::pair<c10::TensorImpl *, size_t>> found;
    for (const Noted &noted : replay->calls)
        for (const c10::IValue &value : noted.results) {
            const auto count = [&](const at::Tensor &tensor) {
                found.emplace_back(tensor.unsafeGetTensorImpl(), tensor.use_count());
            };
            if (value.isTensor())
                count(value.toTensor());
            else if (value.isList())
                for (const c10::IValue &element : value.toListRef())
                    count(element.toTensor());
        }
    return found;
}

Replay *replay_at(int64_t address) {
    return reinterpret_cast<Replay *>(address);
}

int64_t begin_learning() {
    auto *replay = new Replay;
    replay->learns = true;
    running = replay;
    return reinterpret_cast<int64_t>(replay);
}

void learn_standin(int64_t address, const at::Tensor &tensor) {
    take_for_standin(replay_at(address), tensor);
}

// The operator that is being learned, by its number, name and overload; -1: none.
std::tuple<int64_t, std::string, std::string> learned_now() {
    if (running == nullptr || !running->learns || running->depth == 0)
        return {-1, "", ""};
    const auto &name = running->calls.back().op.operator_name();
    return {static_cast<int64_t>(running->calls.size()) - 1, name.name, name.overload_name};
}

// How many operators the step() that is learned or played has called; -1: there is none.
int64_t operators_so_far() {
    if (running == nullptr)
        return -1;
    return static_cast<int64_t>(running->learns ? running->calls.size() : running->next);
}

// The call, the argument and the element of each number that operators were given; empty if they
// can't be played.
std::vector<int64_t> end_learning(int64_t address) {
    Replay *replay = replay_at(address);
    running = nullptr;
    replay->learns = false;
    std::vector<int64_t> places;
    for (size_t i = 0; i < replay->calls.size() && !replay->failed; i++)
        for (const auto &[argument, element] : replay->calls[i].places)
            places.insert(places.end(), {static_cast<int64_t>(i), static_cast<int64_t>(argument),
                                         static_cast<int64_t>(element)});
    replay->is_free.assign(replay->values.size(), 0);
    return places;
}

bool has_failed(int64_t address) {
    return replay_at(address)->failed;
}

// free: the numbers that may be others. Nothing else refers to the results now.
void set_free(int64_t address, const std::vector<int64_t> &free) {
    Replay *replay = replay_at(address);
    for (const int64_t number : free)
        replay->is_free.at(static_cast<size_t>(number)) = 1;
    replay->counts = counts_of(replay);
}

} // namespace

bool replay_answers(const c10::OperatorHandle &op, c10::DispatchKeySet keys,
                    torch::jit::Stack *stack, PassOn pass_on) {
    if (running == nullptr)
        return false;
    if (running->learns)
        return learn(running, op, keys, stack, pass_on);
    return play(running, op, stack);
}

} // namespace optfuse

void of_shim_play(of_shim_replay *handle) {
    auto *replay = reinterpret_cast<optfuse::Replay *>(handle);
    replay->next = 0;
    replay->failed = false;
    optfuse::running = replay;
}

bool of_shim_played(of_shim_replay *handle, double *numbers) {
    auto *replay = reinterpret_cast<optfuse::Replay *>(handle);
    optfuse::running = nullptr;
    if (replay->failed || replay->next != replay->calls.size())
        return false;
    std::copy(replay->values.begin(), replay->values.end(), numbers);
    return optfuse::counts_of(replay) == replay->counts || !OF_GUARD(replay_kept);
}

void of_shim_replay_free(of_shim_replay *handle) {
    auto *replay = reinterpret_cast<optfuse::Replay *>(handle);
    if (optfuse::running == replay) // an interrupt came between two lines of Python
        optfuse::running = nullptr;
    delete replay;
}

TORCH_LIBRARY_FRAGMENT(optfuse, m) {
    m.def("begin_learning() -> int", optfuse::begin_learning);
    m.def("learn_standin(int replay, Tensor standin) -> ()", optfuse::learn_standin);
    m.def("learned_now() -> (int, str, str)", optfuse::learned_now);
    m.def("operators_so_far() -> int", optfuse::operators_so_far);
    m.def("end_learning(int replay) -> int[]", optfuse::end_learning);
    m.def("has_failed(int replay) -> bool", optfuse::has_failed);
    m.def("set_free(int replay, int[] free) -> ()", optfuse::set_free);
}
