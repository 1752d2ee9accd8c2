// SPDX-License-Identifier: BSD-3-Clause
#include "loader/reader.h"

#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <unordered_map>

#include "base/error.h"
#include "plan/slots.h"
#include "python/callback.h"
#include "python/interpreter.h"
#include "shim.h"

namespace optfuse {
namespace {

// The parameters of a group in a list; or nullptr, and Python has raised.
Ref params_of(of_object *group) {
    of_object *const params = of_interpreter.item(group, "params");
    if (params == nullptr || is_exactly(params, of_interpreter.list_type))
        return Ref(params);
    const Ref others(params);
    return Ref(of_interpreter.list_of(params));
}

} // namespace

PythonReader::PythonReader(PythonOwner &its, of_object *its_optimizer)
    : owner(its), optimizer_held(its_optimizer != nullptr || its.optimizer_ref == nullptr
                                     ? nullptr
                                     : of_interpreter.call_objects(its.optimizer_ref, nullptr)),
      link(its.link_ref == nullptr ? nullptr : of_interpreter.call_objects(its.link_ref, nullptr)),
      optimizer(its_optimizer != nullptr ? its_optimizer : optimizer_held.get()),
      scale(is_alive() && has_scale()) {}

bool PythonReader::is_alive() const {
    const of_object *const none = of_interpreter.none;
    return optimizer != nullptr && optimizer != none && link.get() != nullptr &&
           link.get() != none;
}

void PythonReader::check_alive() const {
    if (!is_alive())
        fail("optfuse: this optimizer no longer exists");
}

template <typename... Arguments>
of_object *PythonReader::ask(const char *method, const char *format, Arguments... arguments) {
    const std::string all = std::string("sO") + format;
    of_object *const answer = of_interpreter.call_method(link.get(), "ask", all.c_str(), method,
                                                         optimizer, arguments...);
    if (answer == nullptr)
        throw RaisedInPython();
    return answer;
}

template <typename... Arguments>
bool PythonReader::is_so(const char *method, const char *format, Arguments... arguments) {
    const Gil gil(*this, true);
    const Ref answer(ask(method, format, arguments...));
    return of_interpreter.is_true(answer.get()) != 0;
}

template <typename... Arguments>
std::string PythonReader::text(const char *method, const char *format, Arguments... arguments) {
    const Gil gil(*this, true);
    const Ref answer(ask(method, format, arguments...));
    const char *const utf8 = of_interpreter.utf8(answer.get(), nullptr);
    if (utf8 == nullptr)
        throw RaisedInPython();
    return utf8;
}

// ---- seen with the GIL

of_object *PythonReader::attribute(const char *name) const {
    const Ref all(of_interpreter.attribute(optimizer, "__dict__"));
    return all.get() == nullptr ? nullptr : of_interpreter.dict_item(all.get(), name);
}

bool PythonReader::has_scale() const {
    if (!has(OF_SHIM_READS_SCALE))
        return false;
    const auto is_there = [](const of_object *value) {
        return value != nullptr && value != of_interpreter.none;
    };
    return is_there(attribute("grad_scale")) || is_there(attribute("found_inf"));
}

bool PythonReader::is_same_state() const {
    of_object *const state = attribute("state");
    if (!owner.known.knows_state || state == nullptr)
        return false;
    Comparison entries(owner.known.entries), values(owner.known.values);
    if (!entries.next_is_dict(state) || !entries.is_over())
        return false;
    const std::vector<of_object *> &found = owner.known.entries.all();
    for (size_t i = 1; i < found.size(); i += 2)
        if (!values.next_is_dict(found[i]))
            return false;
    return values.is_over();
}

bool PythonReader::has_same_options(of_object *groups) const {
    if (!owner.known.knows_options || !is_exactly(groups, of_interpreter.list_type))
        return false;
    Comparison options(owner.known.options);
    const ssize_t n = of_interpreter.list_size(groups);
    for (ssize_t i = 0; i < n; i++) {
        of_object *const group = of_interpreter.list_item(groups, i);
        if (!is_exactly(group, of_interpreter.dict_type) || !options.next_is_dict(group))
            return false;
    }
    return options.is_over();
}

bool PythonReader::has_same_params_in_lists() const {
    Comparison params(owner.known.params);
    for (of_object *const list : owner.known.lists)
        if (!params.next_is_list(list))
            return false;
    return params.is_over();
}

// Calls visit(list) with the parameters of each group. False: it said so.
template <typename Visit> bool PythonReader::each_list(const Visit &visit) const {
    const Ref found(of_interpreter.attribute(optimizer, "param_groups"));
    const Ref groups(found.get() == nullptr ? nullptr : of_interpreter.list_of(found.get()));
    const ssize_t n = groups.get() == nullptr ? -1 : of_interpreter.list_size(groups.get());
    bool all = n >= 0;
    for (ssize_t i = 0; all && i < n; i++) {
        const Ref list = params_of(of_interpreter.list_item(groups.get(), i));
        all = list.get() != nullptr && visit(list.get());
    }
    if (of_interpreter.raised() != nullptr)
        throw RaisedInPython();
    return all;
}

bool PythonReader::has_params() const {
    Comparison params(owner.known.params);
    return each_list([&](of_object *list) { return params.next_is_list(list); }) &&
           params.is_over();
}

Look PythonReader::look() {
    const Gil gil(*this, true);
    if (has(OF_SHIM_IS_SHARDED) && is_so("are_replaced", ""))
        return {false, false, false};
    const Ref groups(of_interpreter.attribute(optimizer, "param_groups"));
    const bool all = groups.get() != nullptr && has_same_options(groups.get()) &&
                     has_same_params_in_lists();
    const bool params = all || has_params();
    return {params, all, is_same_state()};
}

bool PythonReader::remember_state() {
    Remembered &known = owner.known;
    of_object *const state = attribute("state");
    known.entries = Objects();
    known.values = Objects();
    if (state == nullptr)
        return false;
    if (!is_dict(state)) {
        const Ref kept(ask("keep_state", ""));
        return false;
    }
    known.entries.add_dict(state);
    const std::vector<of_object *> &found = known.entries.all();
    for (size_t i = 1; i < found.size(); i += 2)
        known.values.add_dict(found[i]);
    const Ref entries = known.entries.keep(), values = known.values.keep();
    of_interpreter.set_attribute(link.get(), "kept_entries", entries.get());
    of_interpreter.set_attribute(link.get(), "kept_values", values.get());
    return true;
}

void PythonReader::check_pass(bool only_adds) {
    if (has(OF_SHIM_COUNTS_PASSES) || (!only_adds && of_interpreter.set_size(owner.scaled) > 0))
        is_so("check_pass", "i", only_adds);
    const Ref yes(of_interpreter.boolean(1));
    of_interpreter.set_attribute(link.get(), "marked", yes.get());
}

void PythonReader::await_reduction() {
    is_so("await_reduction", "");
}

void PythonReader::update(size_t slot) {
    is_so("apply", "n", static_cast<ssize_t>(slot));
}

void PythonReader::update_alone(size_t slot) {
    is_so("update_alone", "n", static_cast<ssize_t>(slot));
}

void PythonReader::end_pass() {
    is_so("end_pass", "");
}

// ---- what the ledger asks

bool PythonReader::has_same_params() {
    const Gil gil(*this, true);
    return has_params();
}

void PythonReader::rebuild() {
    const Gil gil(*this, true);
    Remembered &known = owner.known;
    known.knows_options = known.knows_state = false;
    known.params = Objects();
    known.of_slot.clear();
    const Ref traits(ask("tell_params", ""));
    known.traits = static_cast<int>(of_interpreter.number(traits.get()));
    Objects params;
    each_list([&](of_object *list) {
        for (ssize_t i = 0; i < of_interpreter.list_size(list); i++)
            params.add(of_interpreter.list_item(list, i));
        params.end();
        return true;
    });
    known.params = std::move(params);
    known.of_slot.resize(owner.plan.slots.size());
    const Ref kept = known.params.keep();
    of_interpreter.set_attribute(link.get(), "kept_params", kept.get());
}

void PythonReader::check_rebuild() {
    is_so("check_rebuild", "");
}

void PythonReader::attach() {
    is_so("attach", "");
}

size_t PythonReader::count_groups() {
    size_t n = 0;
    is_constant = true;
    const Gil gil(*this, true);
    owner.known.knows_options = false; // half of them are told if this fails
    each_list([&](of_object *) { return ++n != 0; });
    remember_options(); // what changes meanwhile is other at the next look
    return n;
}

std::vector<double> PythonReader::numbers(size_t group) {
    const Gil gil(*this, true);
    const Ref found(ask("numbers", "n", static_cast<ssize_t>(group)));
    std::vector<double> all;
    is_constant &= of_interpreter.is_true(of_interpreter.tuple_item(found.get(), 0)) != 0;
    for (ssize_t i = 1; i < of_interpreter.tuple_size(found.get()); i++)
        all.push_back(of_interpreter.real(of_interpreter.tuple_item(found.get(), i)));
    return all;
}

// Groups that could become others without another object in them are never found the same.
void PythonReader::told_options() {
    owner.known.knows_options = is_constant && !owner.known.lists.empty();
}

void PythonReader::remember_options() {
    Remembered &known = owner.known;
    known.options = Objects();
    known.lists.clear();
    const Ref groups(of_interpreter.attribute(optimizer, "param_groups"));
    if (groups.get() == nullptr || !is_exactly(groups.get(), of_interpreter.list_type))
        return;
    const ssize_t n = of_interpreter.list_size(groups.get());
    for (ssize_t i = 0; i < n; i++) {
        of_object *const group = of_interpreter.list_item(groups.get(), i);
        known.options.add_dict(group);
        known.lists.push_back(of_interpreter.dict_item(group, "params"));
    }
    const Ref kept = known.options.keep();
    of_interpreter.set_attribute(link.get(), "kept_options", kept.get());
}

void PythonReader::tell_state() {
    const Gil gil(*this, true);
    owner.known.knows_state = false;
    const bool all = remember_state(); // what changes meanwhile is other at the next look
    owner.known.must_prepare = true;
    owner.known.knows_state = is_so("tell_state", "") && all;
}

bool PythonReader::leaves_state() {
    return is_so("leaves_state", "");
}

bool PythonReader::make_state(size_t slot) {
    const Gil gil(*this, true);
    owner.known.knows_state = false; // the next look is at all of it
    owner.known.has_made = true;
    return is_so("make_entry", "n", static_cast<ssize_t>(slot));
}

of_object *PythonReader::entry_of(size_t slot) const {
    of_object *const state = attribute("state");
    const size_t place = slot + owner.plan.slots[slot]->group; // each group has an end
    if (state == nullptr || !is_dict(state) || place >= owner.known.params.all().size())
        return nullptr;
    return of_interpreter.dict_value(state, owner.known.params.all()[place]);
}

void PythonReader::sync_slot(size_t slot) {
    const Gil gil(*this, true);
    const Ref groups(of_interpreter.attribute(optimizer, "param_groups"));
    if (groups.get() == nullptr || !has_same_options(groups.get())) {
        owner.ledger.tell_options(*this);
        prepare({true, false, true});
    }
    of_object *const entry = entry_of(slot);
    Objects &known = owner.known.of_slot[slot];
    Comparison same(known);
    if (same.next_is(entry) && (entry == nullptr || same.next_is_dict(entry)) && same.is_over())
        return;
    known = Objects(); // what changes meanwhile is other at the next look
    known.add(entry);
    if (entry != nullptr && is_dict(entry))
        known.add_dict(entry);
    const Ref kept = known.keep();
    owner.known.knows_state = false;
    try {
        is_so("tell_entry", "nO", static_cast<ssize_t>(slot), kept.get());
    } catch (...) {
        known = Objects(); // it has not been told
        throw;
    }
}

void PythonReader::move_to_end(const std::vector<size_t> &slots) {
    owner.known.knows_state = false;
    for (const size_t slot : slots)
        is_so("move_to_end", "n", static_cast<ssize_t>(slot));
}

void PythonReader::drop_gradients() {
    const Gil gil(*this, true);
    optfuse::drop_gradients(owner.plan);
}

bool PythonReader::begin(Look *look, bool in_backward) {
    if (c10::impl::TorchDispatchModeTLS::any_modes_set())
        is_so("look_at_modes", "i", in_backward);
    if (!has(OF_SHIM_ASKS) && !scale)
        return true;
    const Gil gil(*this, true);
    const bool goes_on = is_so("begin", "i", in_backward);
    look->state = look->state && is_same_state();
    return goes_on;
}

void PythonReader::prepare(const Look &look) {
    Remembered &known = owner.known;
    if (known.must_prepare || scale || (!known.knows_options))
        known.must_prepare = is_so("prepare", "i", look.groups);
}

// An interrupt that waits comes after what is left to do in Python, or a step whose updates are
// certain would be half confirmed.
void PythonReader::end(bool done) {
    if (!has(OF_SHIM_ASKS) && !owner.known.has_made)
        return;
    const Gil gil(*this, true);
    if (done)
        of_interpreter.run_signal_handlers();
    Raised error; // of a step that has failed
    of_interpreter.fetch(&error.type, &error.value, &error.trace);
    try {
        if (has(OF_SHIM_ASKS))
            is_so("end", "i", done);
    } catch (...) {
        error.drop();
        throw;
    }
    if (done)
        held = error;
    else
        of_interpreter.restore(error.type, error.value, error.trace);
}

void PythonReader::raise_held() {
    if (held.type != nullptr)
        of_interpreter.restore(held.type, held.value, held.trace);
    held = Raised();
}

// ---- between backward() and step()

void PythonReader::note_used() {
    Remembered &known = owner.known;
    if (!known.knows_state) {
        const Gil gil(*this, true);
        remember_state();
    }
    if (std::exchange(known.has_made, false))
        is_so("use_anew", "");
}

void PythonReader::confirmed(bool complained) {
    if (complained)
        owner.known.must_tell_state();
    if (std::exchange(owner.known.has_made, false))
        is_so("use_anew", "");
}

std::string PythonReader::changed_attribute() {
    return has(OF_SHIM_ASKS) ? text("changed_attribute", "") : "";
}

std::vector<const void *> PythonReader::parameters() {
    std::vector<const void *> found;
    for (const of_object *const param : owner.known.params.all())
        if (param != nullptr)
            found.push_back(param);
    return found;
}

std::vector<size_t> PythonReader::groups_now() {
    const Gil gil(*this, true);
    std::unordered_map<const void *, size_t> groups;
    size_t group = 0;
    each_list([&](of_object *list) {
        for (ssize_t i = 0; i < of_interpreter.list_size(list); i++)
            groups[of_interpreter.list_item(list, i)] = group;
        return ++group != 0;
    });
    std::vector<size_t> found;
    for (const void *const param : parameters())
        found.push_back(groups.count(param) != 0 ? groups[param] : kNoGroup);
    return found;
}

std::string PythonReader::changed_option(size_t then, size_t now) {
    const std::vector<double> options = numbers(now);
    const size_t i = owner.ledger.first_difference(then, options);
    return text("changed_option", "nnn", static_cast<ssize_t>(then), static_cast<ssize_t>(now),
                i < options.size() ? static_cast<ssize_t>(i) : -1);
}

bool PythonReader::has_used_state(const Look &look) {
    return look.state && !owner.known.has_made;
}

std::string PythonReader::changed_state(size_t slot) {
    const Gil gil(*this, true);
    return text("changed_state", "n", static_cast<ssize_t>(slot));
}

} // namespace optfuse
