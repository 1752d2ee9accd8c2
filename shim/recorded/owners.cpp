// SPDX-License-Identifier: BSD-3-Clause
#include "recorded/owners.h"

#include <utility>

#include "guard.h"
#include "recorded/ahead.h"

namespace optfuse::recorded {
namespace {

constexpr uint32_t kWhole = UINT32_MAX; // no place: all of a line
constexpr size_t kNoSlot = SIZE_MAX;

const c10::StorageImpl *storage_in(const at::Tensor &tensor) {
    const c10::TensorImpl *impl = tensor.unsafeGetTensorImpl();
    return impl->has_storage() ? storage_of(impl) : nullptr;
}

// Storages in sets, of which each has one owner at most.
class Sets {
  public:
    void add(const c10::StorageImpl *storage, size_t slot = kNoSlot) {
        const auto [at, is_new] =
            numbers.emplace(storage, static_cast<uint32_t>(parents.size()));
        if (is_new) {
            parents.push_back(at->second);
            slots.push_back(kNoSlot);
        }
        if (slot == kNoSlot)
            return;
        const uint32_t root = find(at->second);
        are_apart &= slots[root] == kNoSlot || slots[root] == slot;
        slots[root] = slot;
    }

    // The set of a storage, or kWhole if lines only read it.
    uint32_t of(const c10::StorageImpl *storage) {
        const auto found = numbers.find(storage);
        return found == numbers.end() ? kWhole : find(found->second);
    }

    // False: they have different owners.
    bool unite(uint32_t a, uint32_t b) {
        if (a == b)
            return true;
        if (slots[a] != kNoSlot && slots[b] != kNoSlot && slots[a] != slots[b] &&
            OF_GUARD(ahead_owners))
            return false;
        parents[b] = a;
        if (slots[a] == kNoSlot)
            slots[a] = slots[b];
        return true;
    }

    size_t slot_of(uint32_t set) { return slots[find(set)]; }

    bool are_apart = true;

  private:
    uint32_t find(uint32_t i) {
        while (parents[i] != i)
            i = parents[i] = parents[parents[i]];
        return i;
    }

    ska::flat_hash_map<const c10::StorageImpl *, uint32_t> numbers;
    std::vector<uint32_t> parents;
    std::vector<size_t> slots;
};

class Sharing {
  public:
    Sharing(const std::vector<Line> &the_lines, const std::vector<c10::IValue> &its)
        : lines(the_lines), values(its) {}

    std::string run(const std::vector<Anchor> &anchors, std::vector<Part> *parts) {
        for (const Anchor &anchor : anchors) {
            sets.add(anchor.storage, anchor.slot);
            if (anchor.is_gradient)
                with_gradient.insert(anchor.slot);
        }
        if (!sets.are_apart)
            return "has parameters or gradients in the same memory";
        for (const Line &line : lines)
            add_written(line);
        for (const Line &line : lines)
            if (!each_place(line, [&](uint32_t place) { return unite(line, place); }))
                return "combines several parameters (" + line.op.schema().name() + ")";
        for (const Line &line : lines)
            if (!each_place(line, [&](uint32_t place) { return give(line, place, parts); }))
                return "writes what belongs to no parameter (" + line.op.schema().name() + ")";
        return changes_others ? "changes parameters without gradients" : "";
    }

  private:
    void add_written(const Line &line) {
        for (uint32_t i = line.first; i < line.end; i++)
            if (i >= line.results || line.known->writes[i - line.first])
                each_tensor(values[i], [this](const at::Tensor &tensor) {
                    sets.add(storage_in(tensor));
                    return true;
                });
    }

    // The number of places of a line of lists that can be told apart; 0: it is one whole.
    uint32_t places_of(const Line &line) const {
        if (!line.known->of_lists || !values[line.first].isList())
            return 0;
        const size_t n = values[line.first].toListRef().size();
        for (uint32_t i = line.first; i < line.end; i++) {
            const c10::IValue &value = values[i];
            if (value.isList() ? value.toListRef().size() != n
                               : value.isTensor() && value.toTensor().defined() &&
                                     value.toTensor().numel() != 1)
                return 0;
        }
        return static_cast<uint32_t>(n);
    }

    template <typename Work> bool each_place(const Line &line, const Work &work) const {
        const uint32_t n = places_of(line);
        if (n == 0)
            return work(kWhole);
        for (uint32_t place = 0; place < n; place++)
            if (!work(place))
                return false;
        return true;
    }

    c10::IValue at_place(const c10::IValue &value, uint32_t place) const {
        return value.isList() ? value.toListRef()[place] : value;
    }

    bool unite(const Line &line, uint32_t place) {
        uint32_t set = kWhole;
        const auto meet = [&](const at::Tensor &tensor) {
            const uint32_t other = sets.of(storage_in(tensor));
            if (other == kWhole)
                return true;
            if (set != kWhole && !sets.unite(set, other))
                return false;
            set = set == kWhole ? other : sets.of(storage_in(tensor));
            return true;
        };
        for (uint32_t i = line.first; i < line.end; i++)
            if (!each_tensor(place == kWhole ? values[i] : at_place(values[i], place), meet))
                return false;
        return true;
    }

    size_t owner_of(const Line &line, uint32_t place) {
        size_t slot = kNoSlot;
        for (uint32_t i = line.first; i < line.end && slot == kNoSlot; i++)
            each_tensor(place == kWhole ? values[i] : at_place(values[i], place),
                        [&](const at::Tensor &tensor) {
                            const uint32_t set = sets.of(storage_in(tensor));
                            if (set != kWhole)
                                slot = sets.slot_of(set);
                            return slot == kNoSlot;
                        });
        return slot;
    }

    bool give(const Line &line, uint32_t place, std::vector<Part> *parts) {
        const size_t slot = owner_of(line, place);
        if (slot == kNoSlot)
            return false;
        // Nothing would run these lines.
        changes_others |= line.known->writes.any() && with_gradient.count(slot) == 0;
        if (parts == nullptr)
            return true;
        Part &part = (*parts)[slot];
        const auto first = static_cast<uint32_t>(part.values.size());
        for (uint32_t i = line.first; i < line.end; i++)
            part.values.push_back(place == kWhole ? values[i] : alone(values[i], place));
        const auto end = static_cast<uint32_t>(part.values.size());
        part.lines.push_back({line.op, line.known, first,
                              first + (line.results - line.first), end});
        return true;
    }

    // A list of one.
    static c10::IValue alone(const c10::IValue &value, uint32_t place) {
        if (value.isTensorList())
            return c10::List<at::Tensor>({value.toTensorList().get(place)});
        if (!value.isList())
            return value;
        c10::impl::GenericList one(value.toList().elementType());
        one.push_back(value.toListRef()[place]);
        return one;
    }

    const std::vector<Line> &lines;
    const std::vector<c10::IValue> &values;
    Sets sets;
    ska::flat_hash_set<size_t> with_gradient; // slots
    bool changes_others = false;
};

} // namespace

std::string share_out(const std::vector<Line> &lines, const std::vector<c10::IValue> &values,
                      const std::vector<Anchor> &anchors, std::vector<Part> *parts) {
    return Sharing(lines, values).run(anchors, parts);
}

} // namespace optfuse::recorded
