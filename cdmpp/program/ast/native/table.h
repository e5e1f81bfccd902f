// Stores the leaves of many programs in flat arrays.
#pragma once

#include <tvm/ffi/container/map.h>
#include <tvm/ffi/container/tensor.h>

#include <array>

#include "walk.h"

namespace cdmpp {

/// Columns of numbers, each stored line by line. The fields of Collected in table.py document their meaning.
enum IntColumn : int {
  kAccessLeaf, kAccessBuffer, kRow, kLoopPlace, kNode, kBuffer, kProgram, kLinearCell, kDeltaCell,
  kUseCell, kGatherCell, kOpaqueAccess, kFlatRows, kIntColumns,
};
enum RealColumn : int { kLeafColumn, kOpsColumn, kAccessColumn, kRealColumns };

/// Name of a column, and how many numbers one of its lines has.
struct ColumnSpec {
  const char* name;
  int64_t width;
};
inline constexpr ColumnSpec kIntSpecs[kIntColumns] = {
    {"access_leaf", 1}, {"access_buffer", 1}, {"row", 3}, {"place", 5}, {"node", 4}, {"buffer", 3},
    {"program", 3}, {"linear", 3}, {"delta", 3}, {"use", 3}, {"gather", 2}, {"opaque", 1}, {"flat", 2},
};
inline constexpr ColumnSpec kRealSpecs[kRealColumns] = {{"leaf", 22}, {"ops", kOperations}, {"access", 6}};

/// The same names as LEAF_COLUMNS in table.py.
inline constexpr const char* kLeafNames =
    "program loops itemsize is_float stores is_init is_reduction guarded predicated position nest max_step explicit "
    "domain branch_inner divmod divmod_inner opaque index shared_before shared_after hoisted";

/// A vector of numbers that becomes the memory of a tensor.
template <typename T>
struct Owned {
  std::vector<T> values;

  void AllocData(DLTensor* tensor) { tensor->data = values.data(); }
  void FreeData(DLTensor*) {}

  static ffi::Tensor tensor(std::vector<T> values, int64_t width) {
    std::vector<int64_t> shape = {static_cast<int64_t>(values.size()) / width};
    if (width > 1) shape.push_back(width);
    DLDataType dtype{static_cast<uint8_t>(std::is_same_v<T, double> ? kDLFloat : kDLInt), 64, 1};
    return ffi::Tensor::FromNDAlloc(Owned{std::move(values)}, {shape.data(), shape.size()}, dtype, {kDLCPU, 0});
  }
};

class Table {
 public:
  void add(const Program& program) {
    for (const Loop& loop : program.loops)
      append(kNode, {loop.extent, loop.kind, loop.unrolled, loop.scalarised});
    bool on_gpu = std::any_of(program.loops.begin(), program.loops.end(),
                              [](const Loop& loop) { return loop.kind == kThreadIdx; });
    for (size_t i = 0; i < program.shared_prefix.size(); ++i)
      append(kBuffer, {program.shared_prefix[i], program.renewed[i], program.threads_share[i]});
    int64_t before = 1;
    for (size_t i = 0; i < program.leaves.size(); ++i) {
      int64_t after = 1;
      if (i + 1 < program.leaves.size()) after = shared(program, program.leaves[i], program.leaves[i + 1]);
      leaf(program, program.leaves[i], on_gpu, static_cast<int64_t>(i), before, after);
      before = after;
    }
    append(kProgram, {static_cast<int64_t>(program.leaves.size()), program.leaves.back().nest + 1, program.n_nodes});
    nodes_ += static_cast<int64_t>(program.loops.size());
    buffers_ += static_cast<int64_t>(program.shared_prefix.size());
    ++programs_;
  }

  /// The columns by name, each of shape (lines, numbers in a line), or (lines,) if that number is one. Empties the table.
  ffi::Map<ffi::String, ffi::Tensor> columns() {
    ffi::Map<ffi::String, ffi::Tensor> out;
    for (size_t i = 0; i < ints_.size(); ++i)
      out.Set(kIntSpecs[i].name, Owned<int64_t>::tensor(std::move(ints_[i]), kIntSpecs[i].width));
    for (size_t i = 0; i < reals_.size(); ++i)
      out.Set(kRealSpecs[i].name, Owned<double>::tensor(std::move(reals_[i]), kRealSpecs[i].width));
    return out;
  }

 private:
  /// The loops of one leaf: `depths`, innermost first; `place`, the index in `depths` of each loop of the chain, or -1.
  struct Order {
    std::vector<int> depths, place;
  };

  /// Number of divisions and remainders left in the indices of a leaf after simplification (`all`), of those among them that
  /// change in the innermost loop (`inner`), and of parts of indices that cannot be analysed (`opaque`).
  struct Splits {
    int64_t all = 0, inner = 0, opaque = 0;
  };

  void leaf(const Program& program, const Leaf& leaf, bool on_gpu, int64_t index, int64_t before, int64_t after) {
    const Body& body = *leaf.body;
    auto loop_at = [&](int depth) -> const Loop& {
      return program.loops[static_cast<size_t>(leaf.chain[static_cast<size_t>(depth)])];
    };
    Order order;
    order.depths.assign(leaf.kept.rbegin(), leaf.kept.rend());
    if (on_gpu) {
      auto rank = [&](int depth) {
        int kind = loop_at(depth).kind;
        return kind == kVectorized ? 0 : kind == kThreadIdx ? 1 : 2;
      };
      std::stable_sort(order.depths.begin(), order.depths.end(), [&](int a, int b) { return rank(a) < rank(b); });
    }
    order.place.assign(leaf.chain.size(), -1);
    for (size_t k = 0; k < order.depths.size(); ++k) {
      int depth = order.depths[k];
      order.place[static_cast<size_t>(depth)] = static_cast<int>(k);
      append(kLoopPlace, {leaves_, static_cast<int64_t>(k), nodes_ + leaf.chain[static_cast<size_t>(depth)], depth,
                          has(leaf.reduction, depth)});
    }
    Splits splits = accesses(program, leaf, order);
    const Loop* last = leaf.chain.empty() ? nullptr : &program.loops[static_cast<size_t>(leaf.chain.back())];
    int64_t max_step = last ? last->max_step : 0;
    int64_t hoisted = 1;
    for (auto depth = leaf.kept.rbegin(); depth != leaf.kept.rend(); ++depth) {
      const Loop& loop = loop_at(*depth);
      bool sequential = loop.kind == kSerial || loop.kind == kUnrolled || loop.kind == kVectorized;
      if (!sequential || has(leaf.special, *depth)) break;
      hoisted = times(hoisted, loop.extent);
    }
    bool branch_inner = !order.depths.empty() && has(leaf.branch, order.depths[0]);
    append(kLeafColumn,
           {real(programs_), real(order.depths.size()), body.itemsize, real(body.is_float), real(body.stores),
            real(leaf.is_init), real(leaf.reduction != 0), real(leaf.guarded), real(leaf.predicated),
            real(leaf.position), real(leaf.nest), real(max_step), real(last && max_step ? last->explicit_unroll : 0),
            real(body.domain.empty() ? 0 : body.points), real(branch_inner), real(splits.all), real(splits.inner),
            real(splits.opaque), real(index), real(before), real(after), real(hoisted)});
    reals_[kOpsColumn].insert(reals_[kOpsColumn].end(), body.ops, body.ops + kOperations);
    ++leaves_;
  }

  Splits accesses(const Program& program, const Leaf& leaf, const Order& order) {
    Space& space = *leaf.space;
    std::vector<bool> left;  // by atom: whether it is left in an index of the leaf after simplification
    std::vector<Form> forms;
    for (const Access& access : leaf.body->accesses) {
      const BufferInfo& info = leaf.body->buffers[access.buffer];
      auto buffer = static_cast<size_t>(leaf.buffers[access.buffer]);
      forms.clear();
      for (const Tree& tree : access.index) forms.push_back(evaluate(tree, leaf.slots, space));
      std::vector<int> fixed = order.depths;
      for (int& depth : fixed) {
        if (depth >= program.renewed[buffer]) continue;
        int kind = program.loops[static_cast<size_t>(leaf.chain[static_cast<size_t>(depth)])].kind;
        if (!(program.threads_share[buffer] && kind == kThreadIdx)) depth = -1;
      }
      // If TVM will shrink a buffer, its strides change: its dimensions are not merged into one flat address.
      indices(space, forms, info.shape, fixed, order.place, program.shared_prefix[buffer] > 0, left);
      auto dims = static_cast<int64_t>(std::max<size_t>(1, forms.size()));
      int64_t size = 1;
      for (int64_t extent : info.shape) size = times(size, extent);
      append(kAccessColumn, {info.itemsize, real(access.loads), real(access.stores), real(info.scope), real(size),
                             real(dims)});
      append(kAccessLeaf, {leaves_});
      append(kAccessBuffer, {buffers_ + leaf.buffers[access.buffer]});
      for (int64_t i = 0; i < dims; ++i) {
        auto at = static_cast<size_t>(i);
        append(kRow, {accesses_, dims - 1 - i, at < info.shape.size() ? info.shape[at] : 1});
      }
      rows_ += dims;
      ++accesses_;
    }
    Splits out;
    for (size_t i = 0; i < left.size(); ++i) {
      if (!left[i]) continue;
      bool is_opaque = space.atoms[i].op == kOpaque;
      out.opaque += is_opaque;
      out.all += !is_opaque;
      out.inner += !is_opaque && !order.depths.empty() && has(space.atoms[i].loops, order.depths[0]);
    }
    return out;
  }

  /// Append the cells of the rows of one access. `fixed`: loops in order, -1 for those that reuse the storage for new data.
  void indices(const Space& space, const std::vector<Form>& forms, const std::vector<int64_t>& shape,
               const std::vector<int>& fixed, const std::vector<int>& place, bool shrinks,
               std::vector<bool>& left) {
    auto place_of = [&](int64_t depth) { return place[static_cast<size_t>(depth)]; };
    auto linear = [&](int64_t row, const Terms& terms) {
      for (const Term& term : terms)
        if (term.key >= 0 && place_of(term.key) >= 0)
          append(kLinearCell, {rows_ + row, place_of(term.key), term.coef});
    };
    bool affine = true;
    for (const Form& form : forms)
      for (const Term& term : form.terms) affine &= term.key >= 0;
    auto each_row = [&](auto&& visit) {
      for (size_t row = 0; row < forms.size(); ++row)
        if (!forms[row].constant) visit(static_cast<int64_t>(row), forms[row].terms);
    };
    if (affine) return each_row(linear);
    Terms address;
    int64_t stride = 1;
    for (size_t i = forms.size(); i-- > 0;) {
      for (const Term& term : forms[i].terms) count(address, term.key, times(term.coef, stride));
      stride = times(stride, shape[i]);
    }
    Form joined = space.joined(Form(std::move(address)));
    const Terms& flat = joined.terms;
    bool flat_is_affine = std::none_of(flat.begin(), flat.end(), [](const Term& term) { return term.key < 0; });
    if (flat_is_affine && !shrinks) {
      int64_t last = static_cast<int64_t>(forms.size()) - 1;
      linear(last, flat);
      append(kFlatRows, {rows_, rows_ + last});
      return;
    }
    each_row(linear);
    std::unordered_map<int64_t, std::vector<int64_t>> known;
    bool is_opaque = false;
    each_row([&](int64_t row, const Terms& terms) {
      for (const Term& term : terms) {
        if (term.key >= 0) continue;
        const Atom& atom = space.atom(term.key);
        auto number = static_cast<size_t>(-1 - term.key);
        left.resize(std::max(left.size(), number + 1));
        left[number] = true;
        is_opaque |= atom.op == kOpaque;
        int64_t weight = magnitude(term.coef), before = 0;
        const std::vector<int64_t>& spans = space.spans_by_depth(term.key, fixed, known);
        for (size_t k = 1; k < spans.size(); ++k) {
          if (spans[k] == before) continue;
          append(kDeltaCell, {rows_ + row, static_cast<int64_t>(k) - 1, times(weight, minus(spans[k], before))});
          before = spans[k];
        }
        for (int64_t depth = 0; depth < 64; ++depth) {
          if (!has(atom.loops, depth)) continue;
          int k = place_of(depth);
          if (k >= 0 && fixed[static_cast<size_t>(k)] >= 0)
            append(kUseCell, {rows_ + row, k, space.step({term}, depth)});
        }
      }
    });
    Set loops = 0;
    for (const Term& term : flat)
      if (term.key < 0) loops |= space.atom(term.key).loops;
    for (int64_t depth = 0; depth < 64; ++depth)
      if (has(loops, depth) && place_of(depth) >= 0) append(kGatherCell, {accesses_, place_of(depth)});
    if (is_opaque) append(kOpaqueAccess, {accesses_});
  }

  /// Product of the extents of the loops that two leaves have in common.
  static int64_t shared(const Program& program, const Leaf& a, const Leaf& b) {
    int64_t total = 1;
    for (size_t i = 0; i < a.chain.size() && i < b.chain.size() && a.chain[i] == b.chain[i]; ++i)
      total = times(total, program.loops[static_cast<size_t>(a.chain[i])].extent);
    return total;
  }

  template <typename T>
  static double real(T value) {
    return static_cast<double>(value);
  }

  void append(IntColumn column, std::initializer_list<int64_t> values) {
    ints_[column].insert(ints_[column].end(), values);
  }
  void append(RealColumn column, std::initializer_list<double> values) {
    reals_[column].insert(reals_[column].end(), values);
  }

  std::array<std::vector<int64_t>, kIntColumns> ints_;
  std::array<std::vector<double>, kRealColumns> reals_;
  int64_t leaves_ = 0, accesses_ = 0, rows_ = 0, nodes_ = 0, buffers_ = 0, programs_ = 0;
};

}  // namespace cdmpp
