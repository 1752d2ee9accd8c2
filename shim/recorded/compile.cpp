// SPDX-License-Identifier: BSD-3-Clause
// compile.cpp: elementwise lines that share a tensor run together where the last of them stands,
// unless a line in between needs what they write, or writes what they read. Where there are products
// that are alike, what needs nothing of each other then stands side by side.
#include "recorded/compile.h"

#include <algorithm>
#include <optional>
#include <set>
#include <utility>

#include "base/error.h"
#include "cuda/table.h"
#include "guard.h"
#include "recorded/products.h"
#include "recorded/programs.h"

namespace optfuse::recorded {
namespace {

// A line, or one place of a line of lists.
struct Unit {
    uint32_t line;
    std::optional<Instruction> instruction; // none: PyTorch's operator
};

constexpr uint32_t kNobody = UINT32_MAX;

struct OpenGroup {
    std::vector<uint32_t> units;
    uint32_t like = kNobody; // a tensor that it writes
    at::ScalarType dtype = at::kBool; // of the computation
    std::set<uint32_t> tensors;
};

// A step, where the last of its units stands.
struct Planned {
    uint32_t last;
    std::vector<uint32_t> units;
    std::optional<Group> group;
    uint32_t level = 0; // what it needs is on lower ones
};

constexpr size_t kMostStacked = 64u << 20; // bytes, of what stands side by side

class Compiler {
  public:
    Compiler(const std::vector<Line> &the_lines, const std::vector<c10::IValue> &its,
             const Numbered &tensors, std::set<uint32_t> &of_bytes)
        : lines(the_lines), values(its), numbered(tensors), uses(tensors.entries.size()),
          group_of(tensors.entries.size(), kNobody), readers(tensors.n_storages),
          overlaps(tensors.n_storages), units_left(the_lines.size()),
          written_in(tensors.entries.size()), used_in(tensors.entries.size()), in_bytes(of_bytes) {
        find_overlaps();
        for (uint32_t i = 0; i < lines.size(); i++)
            put_units(i);
    }

    // No value: booleans that no line had in bytes are needed there.
    std::optional<Schedule> run() {
        const size_t known = in_bytes.size();
        for (uint32_t i = 0; i < units.size(); i++)
            units[i].instruction ? join(i) : call(i);
        for (uint32_t i = 0; i < open.size(); i++)
            close(i);
        if (in_bytes.size() != known)
            return {};
        put_steps();
        made.words = numbered.words().vec();
        return std::move(made);
    }

  private:
    const Entry &entry(uint32_t number) const { return numbered.entries[number]; }

    // Storages of which two tensors have some elements in common, but not all.
    void find_overlaps() {
        for (const Entry &first : numbered.entries)
            for (uint32_t i = first.next; i != UINT32_MAX; i = entry(i).next) {
                const Entry &other = entry(i);
                const bool are_plain = first.impl->is_non_overlapping_and_dense() &&
                                       other.impl->is_non_overlapping_and_dense() &&
                                       first.dtype == other.dtype;
                if (!are_plain || (first.offset < other.offset + other.numel &&
                                   other.offset < first.offset + first.numel))
                    overlaps[first.storage_number] = OF_GUARD(recorded_parts);
            }
    }

    void put_units(uint32_t i) {
        const Line &line = lines[i];
        const bool is_list =
            line.known->of_lists && line.known->elementwise && values[line.first].isList();
        const auto places = static_cast<uint32_t>(
            is_list ? values[line.first].toListRef().size() : 1);
        const size_t first = units.size();
        for (uint32_t place = 0; place < places; place++) {
            const auto found = translate(line, place, values, numbered);
            if (found.empty() || is_apart(found[0]) || !has_bits(line, place, values, found)) {
                units.resize(first);
                units.push_back({i, {}});
                break;
            }
            for (const Instruction &instruction : found)
                units.push_back({i, instruction});
        }
        units_left[i] = static_cast<uint32_t>(units.size() - first);
        for (size_t u = first; u < units.size(); u++)
            each_of(units[u], [this](uint32_t number, bool) { uses[number]++; });
    }

    // Tensors without a place in a program: of elements that others have, too, or booleans in memory.
    bool is_apart(const Instruction &q) const {
        const auto has_no_place = [this](uint32_t number) {
            return overlaps[entry(number).storage_number] || in_bytes.count(number) != 0;
        };
        return has_no_place(q.to) || std::any_of(q.from, q.from + q.n_from, has_no_place);
    }

    // Calls work(number, is_written) for each tensor of a unit.
    template <typename Work> void each_of(const Unit &unit, const Work &work) const {
        if (unit.instruction) {
            const Instruction &q = *unit.instruction;
            work(q.to, true);
            for (size_t i = 0; i < q.n_from; i++)
                work(q.from[i], false);
            for (size_t i = 0; i < q.n_read; i++)
                work(q.read[i], false);
            return;
        }
        const Line &line = lines[unit.line];
        for (uint32_t i = line.first; i < line.end; i++) {
            const bool writes = i >= line.results || line.known->writes[i - line.first];
            each_tensor(values[i], [&](const at::Tensor &tensor) {
                if (!tensor.unsafeGetTensorImpl()->is_wrapped_number())
                    work(numbered.of(tensor), writes);
                return true;
            });
        }
    }

    void call(uint32_t u) {
        each_of(units[u], [this](uint32_t number, bool is_written) {
            if (group_of[number] != kNobody)
                close(group_of[number]);
            if (is_written)
                close_readers(number);
        });
        planned.push_back({u, {u}, {}});
    }

    void close_readers(uint32_t written) {
        for (const uint32_t reader : std::exchange(readers[entry(written).storage_number], {}))
            if (OF_GUARD(recorded_readers))
                close(reader);
    }

    bool fits(const OpenGroup &group, const Instruction &q) const {
        const Entry &a = entry(group.like), &b = entry(q.to);
        const bool is_any = group.dtype == at::kBool || q.dtype == at::kBool;
        return (is_any || group.dtype == q.dtype) && equal(a.impl->sizes(), b.impl->sizes()) &&
               equal(a.impl->strides(), b.impl->strides());
    }

    // The unit joins the groups that have its tensors, which become one.
    void join(uint32_t u) {
        const Instruction &q = *units[u].instruction;
        uint32_t to = kNobody;
        const auto meet = [&](uint32_t number) {
            const uint32_t found = group_of[number];
            if (found == kNobody || found == to)
                return;
            if (!fits(open[found], q)) {
                close(found);
            } else if (to == kNobody) {
                to = found;
            } else if (can_unite(open[to], open[found])) {
                unite(to, found);
            } else {
                close(found);
            }
        };
        for (size_t i = 0; i < q.n_read; i++)
            if (group_of[q.read[i]] != kNobody)
                close(group_of[q.read[i]]);
        close_readers(q.to);
        meet(q.to);
        for (size_t i = 0; i < q.n_from; i++)
            meet(q.from[i]);
        if (to == kNobody) {
            to = static_cast<uint32_t>(open.size());
            open.emplace_back();
            open[to].like = q.to;
        }
        OpenGroup &group = open[to];
        if (group.dtype == at::kBool)
            group.dtype = q.dtype;
        group.units.push_back(u);
        const auto own = [&](uint32_t number) {
            group_of[number] = to;
            group.tensors.insert(number);
        };
        own(q.to);
        for (size_t i = 0; i < q.n_from; i++)
            own(q.from[i]);
        for (size_t i = 0; i < q.n_read; i++) {
            auto &its = readers[entry(q.read[i]).storage_number];
            if (its.empty() || its.back() != to)
                its.push_back(to);
        }
    }

    static bool can_unite(const OpenGroup &a, const OpenGroup &b) {
        return a.dtype == b.dtype || a.dtype == at::kBool || b.dtype == at::kBool;
    }

    void unite(uint32_t to, uint32_t from) {
        OpenGroup &group = open[to], &other = open[from];
        if (group.dtype == at::kBool)
            group.dtype = other.dtype;
        std::vector<uint32_t> all;
        std::merge(group.units.begin(), group.units.end(), other.units.begin(), other.units.end(),
                   std::back_inserter(all));
        group.units = std::move(all);
        for (const uint32_t number : other.tensors) {
            group_of[number] = to;
            group.tensors.insert(number);
        }
        for (auto &its : readers)
            std::replace(its.begin(), its.end(), from, to);
        other = OpenGroup();
    }

    void close(uint32_t i) {
        OpenGroup group = std::exchange(open[i], {});
        for (const uint32_t number : group.tensors)
            group_of[number] = kNobody;
        if (!group.units.empty())
            emit(group.units.data(), group.units.size());
    }

    static bool is_same_code(const Group &a, const Group &b) {
        return a.patches == b.patches &&
               std::equal(a.code.begin(), a.code.end(), b.code.begin(), b.code.end(),
                          [](const of_instruction &x, const of_instruction &y) {
                              return x.operation == y.operation && x.to == y.to && x.a == y.a &&
                                     x.b == y.b && x.c == y.c;
                          });
    }

    bool is_product(const Planned &one) const {
        return !one.group && recorded::is_product(lines[units[one.last].line], values);
    }

    bool are_alike(const Planned &a, const Planned &b) const {
        return recorded::are_alike(lines[units[a.last].line], lines[units[b.last].line], values);
    }

    // By storages: whoever reads is above those that have written, and who writes above both.
    void put_levels() {
        std::vector<uint32_t> write(numbered.n_storages), read(numbered.n_storages);
        std::vector<bool> is_counted(numbered.entries.size());
        uint32_t base = 1, highest = 0;
        size_t bytes = 0;
        for (Planned &one : planned) {
            one.level = base;
            const auto each = [&](const auto &work) {
                for (const uint32_t u : one.units)
                    each_of(units[u], work);
            };
            each([&](uint32_t number, bool is_written) {
                const uint32_t its = entry(number).storage_number;
                one.level = std::max({one.level, write[its] + 1, is_written ? read[its] + 1 : 0});
            });
            each([&](uint32_t number, bool is_written) {
                const uint32_t its = entry(number).storage_number;
                uint32_t &last = is_written ? write[its] : read[its];
                last = std::max(last, one.level);
                if (entry(number).is_absent && !is_counted[number])
                    bytes += entry(number).storage->nbytes();
                is_counted[number] = true;
            });
            highest = std::max(highest, one.level);
            if (bytes > kMostStacked) {
                base = highest + 1;
                bytes = 0;
            }
        }
    }

    void gather_products() {
        std::vector<const Planned *> products;
        for (const Planned &one : planned)
            if (is_product(one))
                products.push_back(&one);
        const bool some_are_alike =
            std::any_of(products.begin(), products.end(), [&](const Planned *one) {
                return one != products[0] && are_alike(*one, *products[0]);
            });
        if (!some_are_alike)
            return;
        put_levels();
        std::stable_sort(planned.begin(), planned.end(), [](const Planned &a, const Planned &b) {
            return a.level < b.level;
        });
        std::vector<Planned> gathered;
        std::vector<size_t> here; // products of this level among them
        for (Planned &one : planned) {
            if (gathered.empty() || gathered.back().level != one.level)
                here.clear();
            const bool may_join = is_product(one);
            const size_t bytes =
                may_join ? bytes_of_product(lines[units[one.last].line], values) : 0;
            const auto to = std::find_if(here.begin(), here.end(), [&](size_t i) {
                return may_join && are_alike(gathered[i], one) &&
                       (gathered[i].units.size() + 1) * bytes <= kMostStacked;
            });
            if (to != here.end()) {
                gathered[*to].units.push_back(one.units[0]);
                continue;
            }
            if (may_join)
                here.push_back(gathered.size());
            gathered.push_back(std::move(one));
        }
        planned = std::move(gathered);
    }

    void put_steps() {
        std::stable_sort(planned.begin(), planned.end(),
                         [](const Planned &a, const Planned &b) { return a.last < b.last; });
        gather_products();
        for (Planned &one : planned) {
            Step step{one.group.has_value(), units[one.last].line, {}};
            if (!one.group && one.units.size() > 1)
                for (const uint32_t u : one.units)
                    step.products.push_back(units[u].line);
            for (const uint32_t u : one.units)
                if (--units_left[units[u].line] == 0)
                    step.done.push_back(units[u].line);
            if (one.group) {
                one.group->is_as_before = !made.steps.empty() && made.steps.back().is_group &&
                                          is_same_code(*one.group, made.groups.back());
                if (!one.group->is_as_before)
                    made.instructions += one.group->code.size();
                one.group->waits = !joins_batch(one);
                step.number = static_cast<uint32_t>(made.groups.size());
                made.groups.push_back(std::move(*one.group));
            } else {
                batch++;
            }
            made.steps.push_back(std::move(step));
        }
        count_bytes();
    }

    // Whether it may run beside the groups since the last operator, or since the last that waits.
    bool joins_batch(const Planned &one) {
        const auto each = [&](const auto &work) {
            for (const uint32_t u : one.units)
                each_of(units[u], work);
        };
        bool is_apart = true;
        each([&](uint32_t number, bool is_written) {
            is_apart &= written_in[number] != batch && (!is_written || used_in[number] != batch);
        });
        batch += is_apart ? 0 : 1;
        each([&](uint32_t number, bool is_written) {
            used_in[number] = batch;
            if (is_written)
                written_in[number] = batch;
        });
        return is_apart;
    }

    // Results end with the last of the lines that have them.
    void count_bytes() {
        std::vector<bool> is_counted(numbered.entries.size());
        for (auto step = made.steps.rbegin(); step != made.steps.rend(); ++step)
            for (const uint32_t done : step->done)
                each_of({done, {}}, [&](uint32_t number, bool) {
                    if (entry(number).is_absent && !is_counted[number])
                        step->frees += entry(number).storage->nbytes();
                    is_counted[number] = true;
                });
    }

    // Its units as one program, or as several where there are too few registers.
    void emit(const uint32_t *its, size_t n) {
        Group group;
        if (assign(its, n, &group)) {
            planned.push_back({its[n - 1], {its, its + n}, std::move(group)});
            return;
        }
        const size_t half = n / 2; // one unit always fits
        emit(its, half);
        emit(its + half, n - half);
    }

    struct Role {
        uint32_t number;
        size_t first, last;      // places where it is used
        uint32_t used = 0;
        bool is_read_first;      // its values are those of before
        unsigned char place = 0; // register
        bool in_memory = false;
    };

    // False: it has too many tensors.
    bool assign(const uint32_t *its, size_t n, Group *group) {
        std::vector<Role> roles;
        const auto role_of = [&](uint32_t number) -> Role & {
            size_t i = 0; // groups have few tensors
            while (i < roles.size() && roles[i].number != number)
                i++;
            if (i == roles.size())
                roles.push_back({number, n, 0, 0, false});
            return roles[i];
        };
        const auto use = [&](uint32_t number, size_t at, bool reads) {
            Role &role = role_of(number);
            if (role.used++ == 0) {
                role.first = at;
                role.is_read_first = reads;
            }
            role.last = at;
        };
        for (size_t i = 0; i < n; i++) {
            const Instruction &q = *units[its[i]].instruction;
            for (size_t k = 0; k < q.n_from; k++)
                use(q.from[k], i, true);
            use(q.to, i, false);
        }
        for (Role &role : roles) {
            const Entry &e = entry(role.number);
            role.in_memory = !e.is_absent || e.is_needed || role.used < uses[role.number];
            if (!role.in_memory)
                continue;
            if (e.dtype == at::kBool)
                in_bytes.insert(role.number);
            if (group->memory.size() == OF_REGISTER_TEMPORARY)
                return false;
            role.place = static_cast<unsigned char>(group->memory.size());
            group->memory.push_back(role.number);
            if (e.is_absent && !role.is_read_first)
                group->makes.push_back(role.number);
        }
        std::vector<unsigned char> free;
        for (unsigned char r = OF_REGISTERS; r-- > OF_REGISTER_TEMPORARY;)
            free.push_back(r);
        for (size_t i = 0; i < n; i++) {
            const Instruction &q = *units[its[i]].instruction;
            unsigned char from[3] = {};
            for (size_t k = 0; k < q.n_from; k++)
                from[k] = role_of(q.from[k]).place;
            for (size_t k = 0; k < q.n_from; k++) {
                const Role &role = role_of(q.from[k]);
                const bool is_again = std::find(q.from, q.from + k, q.from[k]) != q.from + k;
                if (!role.in_memory && role.last == i && !is_again && q.from[k] != q.to)
                    free.push_back(role.place);
            }
            Role &to = role_of(q.to);
            if (!to.in_memory && to.first == i) {
                if (free.empty())
                    return false;
                to.place = free.back();
                free.pop_back();
            }
            put(group, q, to.place, from);
            if (!to.in_memory && to.last == i && to.first == i) // nobody reads it
                free.push_back(to.place);
        }
        of_program core = {};
        core.code = group->code.data();
        core.n = group->code.size();
        if (of_program_check(&core) != nullptr)
            fail("optfuse: a program can't be run, which is an error of optfuse");
        group->device = entry(units[its[0]].instruction->to).impl->device();
        if (group->device != c10::kCPU &&
            !fits_on_gpu(group->code, std::max<size_t>(group->memory.size(), OF_REGISTER_STATE)))
            return false;
        group->reads = core.reads;
        group->writes = core.writes;
        group->numel = entry(units[its[0]].instruction->to).numel;
        group->dtype = OF_FLOAT32; // unless some of it is not of booleans
        for (size_t i = 0; i < n; i++)
            if (const auto dtype = dtype_of(units[its[i]].instruction->dtype))
                group->dtype = *dtype;
        return true;
    }

    static void put(Group *group, const Instruction &q, unsigned char to,
                    const unsigned char *from) {
        const size_t at = group->code.size();
        group->code.push_back({static_cast<unsigned char>(q.operation), to, from[0], from[1],
                               from[2], 0.0, 0.0});
        group->patches.push_back({at, false, q.s});
        group->patches.push_back({at, true, q.t});
        if (q.s == Number())
            group->patches.erase(group->patches.end() - 2);
        if (q.t == Number())
            group->patches.pop_back();
    }

    const std::vector<Line> &lines;
    const std::vector<c10::IValue> &values;
    const Numbered &numbered;
    std::vector<Unit> units;
    std::vector<uint32_t> uses;                 // by tensor: by how many units
    std::vector<uint32_t> group_of;             // by tensor
    std::vector<std::vector<uint32_t>> readers; // by storage: groups that take a number from it
    std::vector<bool> overlaps;                 // by storage
    std::vector<uint32_t> units_left;           // by line
    std::vector<uint32_t> written_in, used_in;  // by tensor: the last batch
    uint32_t batch = 1;                         // groups that run side by side
    std::set<uint32_t> &in_bytes;               // tensors of booleans that have memory
    std::vector<OpenGroup> open;
    std::vector<Planned> planned;
    Schedule made;
};

} // namespace

bool fits_on_gpu(const std::vector<of_instruction> &code, size_t states) {
    size_t last = OF_REGISTER_TEMPORARY - 1;
    for (const of_instruction &q : code)
        last = std::max<size_t>(last, q.to);
    return states + last - (OF_REGISTER_TEMPORARY - 1) <= OF_CUDA_REGISTERS &&
           code.size() <= OF_CUDA_MOST_CODE;
}

Schedule compile(const std::vector<Line> &lines, const std::vector<c10::IValue> &values,
                 const Numbered &numbered) {
    std::set<uint32_t> in_bytes;
    for (;;)
        if (auto made = Compiler(lines, values, numbered, in_bytes).run())
            return std::move(*made);
}

} // namespace optfuse::recorded
