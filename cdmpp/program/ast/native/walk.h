// Finds the loops and leaves of a PrimFunc, and what TVM's lowering will do to the loops.
//
// The nodes of the AST, in pre-order, are the root (position 0), every loop that runs more than once, and every computation
// (leaf). Loops of extent 1 vanish when a program is lowered, so they are not nodes; sequences and block boundaries carry no
// information and are not nodes either. A reduction block whose initialisation has not been decomposed has two leaves, the
// initialisation first.
#pragma once

#include <memory>

#include "body.h"

namespace cdmpp {

enum LoopKind : int { kSerial, kParallel, kVectorized, kUnrolled, kBlockIdx, kThreadIdx, kVThread };
/// TVM's kind number of a loop bound to a thread axis; the axis's tag tells which of the last three LoopKinds it is.
inline constexpr int kThreadBinding = 4;
/// Trip count assumed for a `while` loop; the program does not say it.
inline constexpr int64_t kWhileTrips = 8;
/// TVM's UnrollLoop pass automatically unrolls at most this many nested loops (its `auto_max_depth`).
inline constexpr int64_t kUnrollMaxDepth = 8;
/// TVM writes out virtual threads one after the other if their extent is below this.
inline constexpr int64_t kVThreadUnrolledBelow = 16;

/// A loop that runs more than once.
struct Loop {
  int parent;  // number of the loop around it, -1 at the top
  int64_t extent;
  int kind;
  int64_t max_step, explicit_unroll;  // pragma_auto_unroll_max_step and pragma_unroll_explicit in effect here
  bool unrolled = false;              // TVM's unrolling pass will unroll it
  bool scalarised = false;            // vectorised, but TVM makes it serial again because a branch depends on it
};

/// A computation with the loops around it.
struct Leaf {
  std::shared_ptr<const Body> body;
  std::vector<int> chain;        // numbers of the loops around it, outermost first
  std::vector<int> kept;         // depths of the loops that repeat it; for an initialisation, of those its output depends on
  std::shared_ptr<Space> space;  // the loops of `chain` and the atoms of its indices
  std::vector<Form> slots;       // value of each slot of `body` as a form over `chain`
  std::vector<int> buffers;      // program-wide number of each buffer of `body`
  int64_t position;              // position in the pre-order of the AST
  Set reduction;                 // depths of the loops that its reduction runs over
  Set branch;                    // depths of the loops that its branches and predicate depend on
  Set special;                   // the same, for the arguments of its exponentials, roots and similar functions
  bool predicated;               // it runs under a condition
  bool is_init, guarded;         // it initialises a reduction; its reduction is initialised under a guard in the same loops
  int64_t nest;                  // number of the top-level loop nest that it belongs to
};

/// Loops and leaves of one program. The three last fields have one element for each of its buffers.
struct Program {
  std::vector<Loop> loops;
  std::vector<Leaf> leaves;
  int64_t n_nodes = 0;
  /// Number of outer loops that all accesses to the buffer have in common; -1 for parameters.
  std::vector<int64_t> shared_prefix;
  /// Number of outer loops inside which it is allocated, so that each of their iterations reuses the same storage for new data.
  std::vector<int64_t> renewed;
  /// Whether the thread loops among these share one allocation.
  std::vector<bool> threads_share;
};

/// Walks through one program.
class Walk {
 public:
  Program run(const Object* func) {
    visit(pointer(func, tvm_.at.func_body));
    if (out_.leaves.empty()) throw ProgramError("the program has no computation: it stores nothing and calls nothing");
    mark_unrolled();
    out_.n_nodes = position_ + 1;
    storage();
    return std::move(out_);
  }

 private:
  /// What a variable stands for: a loop, given by depth; an expression; or, if neither is set, zero.
  struct Bound {
    int depth = -1;
    const Object* expr = nullptr;
  };

  struct Interval {
    bool known;
    int64_t low, high;
  };

  // Expressions over loops; variables that do not depend on a loop count as constants

  Form read(const Object* expr, Space& space) {
    if (expr == nullptr) return 0;
    if (tvm_.kind(expr) == kVar) {
      auto bound = env_.find(expr);
      if (bound != env_.end() && bound->second.depth >= 0) return Terms{{bound->second.depth, 1}};
    }
    Terms out;
    int64_t constant = gather(expr, 1, out, space);
    auto is_zero = [](const Term& term) { return term.coef == 0; };
    out.erase(std::remove_if(out.begin(), out.end(), is_zero), out.end());
    if (out.empty()) return constant;
    return space.joined(Form(std::move(out)));
  }

  /// Add the terms of `factor` times an expression to `out`, and return the constant part.
  int64_t gather(const Object* expr, int64_t factor, Terms& out, Space& space) {
    const Offsets& at = tvm_.at;
    int64_t constant = 0;
    Kind kind;
    const Object* b = nullptr;
    while (true) {
      if (expr == nullptr) return constant;
      kind = tvm_.kind(expr);
      if (kind == kVar) {
        auto bound = env_.find(expr);
        if (bound == env_.end()) return constant;
        if (bound->second.depth >= 0) {
          count(out, bound->second.depth, factor);
          return constant;
        }
        if (bound->second.expr == nullptr) return constant;
        expr = bound->second.expr;
      } else if (kind == kAdd) {
        constant = plus(constant, gather(tvm_.a(expr), factor, out, space));
        expr = tvm_.b(expr);
      } else if (kind == kIntImm) {
        return plus(constant, times(tvm_.int_value(expr), factor));
      } else if (kind == kMul && tvm_.kind(b = tvm_.b(expr)) == kIntImm) {
        factor = times(factor, tvm_.int_value(b));
        expr = tvm_.a(expr);
      } else if (kind == kSub) {
        constant = plus(constant, gather(tvm_.a(expr), factor, out, space));
        factor = minus(0, factor);
        expr = tvm_.b(expr);
      } else if (kind == kCast) {
        expr = pointer(expr, at.cast_value);
      } else {
        break;
      }
    }
    Form form;
    if (kind == kFloorDiv || kind == kFloorMod || kind == kMul) {
      Form left = read(tvm_.a(expr), space);
      Form right = read(tvm_.b(expr), space);
      form = kind == kFloorDiv   ? space.floordiv(left, right)
             : kind == kFloorMod ? space.floormod(left, right)
                                 : space.product(left, right);
    } else {
      std::vector<const Object*> parts;
      if (kind == kTensorLoad) {
        Items indices(pointer(expr, at.load_indices));
        for (size_t i = 0; i < indices.size(); ++i) parts.push_back(indices[i]);
      } else {
        parts = children(expr);
      }
      Set loops = 0;
      for (const Object* part : parts) loops |= space.loops_of(read(part, space));
      form = space.opaque(loops);
    }
    if (form.constant) return plus(constant, times(form.value, factor));
    for (const Term& term : form.terms) count(out, term.key, times(term.coef, factor));
    return constant;
  }

  /// Smallest and largest value of an integer expression over the loops.
  Interval interval(const Object* expr) const {
    const Interval unknown{false, 0, 0};
    Kind kind = tvm_.kind(expr);
    if (kind == kIntImm) return {true, tvm_.int_value(expr), tvm_.int_value(expr)};
    if (kind == kVar) {
      auto found = env_.find(expr);
      if (found == env_.end()) return unknown;
      const Bound& bound = found->second;
      if (bound.depth >= 0) {
        return {true, 0, extents_.at(static_cast<size_t>(bound.depth)) - 1};
      }
      return bound.expr == nullptr ? Interval{true, 0, 0} : interval(bound.expr);
    }
    if (kind == kCast) return interval(pointer(expr, tvm_.at.cast_value));
    if (kind != kAdd && kind != kSub && kind != kMul && kind != kFloorDiv && kind != kFloorMod && kind != kMin &&
        kind != kMax)
      return unknown;
    Interval a = interval(tvm_.a(expr)), b = interval(tvm_.b(expr));
    if (!a.known || !b.known) return unknown;
    auto corners = [&](int64_t (*of)(int64_t, int64_t)) {
      auto [low, high] = std::minmax({of(a.low, b.low), of(a.low, b.high), of(a.high, b.low), of(a.high, b.high)});
      return Interval{true, low, high};
    };
    switch (kind) {
      case kAdd: return {true, plus(a.low, b.low), plus(a.high, b.high)};
      case kSub: return {true, minus(a.low, b.high), minus(a.high, b.low)};
      case kMul: return corners(times);
      case kMin: return {true, std::min(a.low, b.low), std::min(a.high, b.high)};
      case kMax: return {true, std::max(a.low, b.low), std::max(a.high, b.high)};
      default: break;
    }
    if (b.low <= 0) return unknown;
    if (kind == kFloorDiv) return corners(floor_div);
    return {true, 0, a.low >= 0 ? std::min(b.high - 1, a.high) : b.high - 1};
  }

  // Statements

  void visit(const Object* stmt) {
    const Offsets& at = tvm_.at;
    switch (tvm_.kind(stmt)) {
      case kFor: return loops(stmt);
      case kSBlockRealize: return realize(stmt);
      case kSBlock: return block(stmt);
      case kBufferStore: return plain(stmt);
      case kSeqStmt: {
        Items parts(pointer(stmt, at.seq));
        for (size_t i = 0; i < parts.size(); ++i) visit(parts[i]);
        return;
      }
      case kEvaluate:
        if (tvm_.kind(pointer(stmt, at.evaluate_value)) == kCall) plain(stmt);
        return;
      case kIfThenElse: {
        conditions_.push_back(pointer(stmt, at.if_condition));
        visit(pointer(stmt, at.if_then));
        if (const Object* otherwise = pointer(stmt, at.if_else)) visit(otherwise);
        conditions_.pop_back();
        return;
      }
      case kWhile:
        open(kWhileTrips, kSerial);
        visit(pointer(stmt, at.while_body));
        close(1);
        return;
      case kAttrStmt: {
        int64_t max_step = max_step_, explicit_unroll = explicit_unroll_;
        std::string_view key = text(any(stmt, at.attr_key));
        if (key == "pragma_auto_unroll_max_step") max_step_ = tvm_.int_value(pointer(stmt, at.attr_value));
        if (key == "pragma_unroll_explicit") explicit_unroll_ = tvm_.int_value(pointer(stmt, at.attr_value));
        visit(pointer(stmt, at.attr_body));
        max_step_ = max_step;
        explicit_unroll_ = explicit_unroll;
        return;
      }
      case kBind: env_[pointer(stmt, at.bind_var)] = {-1, pointer(stmt, at.bind_value)}; return;
      case kAllocBuffer: allocate(pointer(stmt, at.alloc_buffer)); return;
      case kDeclBuffer:
      case kAssertStmt:
      case kBreak:
      case kContinue:
      case kReturn: return;
      default: throw ProgramError("the program has the statement " + tvm_.type_key(stmt) + ", which cannot be read");
    }
  }

  void loops(const Object* stmt) {
    const Offsets& at = tvm_.at;
    int64_t max_step = max_step_, explicit_unroll = explicit_unroll_;
    int opened = 0;
    std::vector<std::string> axes;
    do {
      const Object *loop_var = pointer(stmt, at.for_var), *extent = pointer(stmt, at.for_extent);
      int64_t n = tvm_.kind(extent) == kIntImm ? tvm_.int_value(extent) : largest(extent, loop_var);
      const Object* annotations = pointer(stmt, at.for_annotations);
      if (!tvm_.map_empty(annotations)) {
        max_step_ = tvm_.map_int(annotations, "pragma_auto_unroll_max_step", max_step_);
        explicit_unroll_ = tvm_.map_int(annotations, "pragma_unroll_explicit", explicit_unroll_);
      }
      Bound& variable = env_[loop_var];
      variable = {};
      if (n != 1) {
        int kind = tvm_.for_kind(stmt);
        int depth = static_cast<int>(chain_.size());
        if (kind == kThreadBinding) {
          const Object* thread = pointer(stmt, at.for_thread);
          std::string tag(text(any(thread, at.iter_tag)));
          kind = starts_with(tag, "block") ? kBlockIdx : starts_with(tag, "v") ? kVThread : kThreadIdx;
          // A thread axis that is bound already: it means the same threads, so it is not another loop.
          auto known = axes_.find(tag);
          if (known != axes_.end()) {
            depth = known->second;
          } else if (kind != kVThread) {
            axes_[tag] = depth;
            axes.push_back(tag);
          }
          axes_seen_ = true;
        }
        variable.depth = depth;
        if (depth == static_cast<int>(chain_.size())) {
          open(n, kind);
          ++opened;
        }
      }
      stmt = pointer(stmt, at.for_body);
    } while (tvm_.kind(stmt) == kFor);
    visit(stmt);
    close(opened);
    for (const std::string& tag : axes) axes_.erase(tag);
    max_step_ = max_step;
    explicit_unroll_ = explicit_unroll;
  }

  void open(int64_t extent, int kind) {
    ++position_;
    if (chain_.empty()) ++nest_;
    if (extent < 1) throw ProgramError("the program has a loop of extent " + std::to_string(extent));
    bit(static_cast<int64_t>(chain_.size()));  // throws if there are more loops than a Set can hold
    int parent = chain_.empty() ? -1 : chain_.back();
    chain_.push_back(static_cast<int>(out_.loops.size()));
    out_.loops.push_back({parent, extent, kind, max_step_, explicit_unroll_});
    extents_.push_back(extent);
  }

  void close(int n) {
    chain_.resize(chain_.size() - static_cast<size_t>(n));
    extents_.resize(chain_.size());
  }

  /// Largest value of an extent that is not constant.
  int64_t largest(const Object* extent, const Object* loop_var) const {
    Interval values = interval(extent);
    if (!values.known) symbolic("loop", any(loop_var, tvm_.at.var_name));
    return std::max<int64_t>(1, values.high);
  }

  void block(const Object* of) {
    const Offsets& at = tvm_.at;
    Items buffers(pointer(of, at.block_allocated));
    for (size_t i = 0; i < buffers.size(); ++i) allocate(buffers[i]);
    if (const Object* init = pointer(of, at.block_init)) visit(init);
    visit(pointer(of, at.block_body));
  }

  void realize(const Object* stmt) {
    const Offsets& at = tvm_.at;
    const Object* of = pointer(stmt, at.realize_block);
    const Object *init = pointer(of, at.block_init), *content = pointer(of, at.block_body);
    Items iter_vars(pointer(of, at.block_iter_vars)), values(pointer(stmt, at.realize_values));
    if (iter_vars.size() != values.size()) throw ProgramError("the program has a block with variables that are not bound");
    const Object* predicate = pointer(stmt, at.realize_predicate);
    bool conditional = tvm_.kind(predicate) != kIntImm;
    if (conditional) conditions_.push_back(predicate);
    std::shared_ptr<Body> body, init_body;
    if (Analyser::straight(content) && (init == nullptr || Analyser::straight(init))) {
      std::vector<const Object*> variables;
      std::vector<int64_t> domain;
      for (size_t i = 0; i < iter_vars.size(); ++i) {
        variables.push_back(pointer(iter_vars[i], at.iter_var));
        const Object* extent = pointer(pointer(iter_vars[i], at.iter_dom), at.range_extent);
        domain.push_back(tvm_.constant(extent, "block", any(of, at.block_name)));
      }
      if (init != nullptr) init_body = analyse(init, variables, domain, true);
      body = analyse(content, variables, domain, false);
      if (!body->does_anything()) body = nullptr;
    }
    if (body == nullptr) {
      for (size_t i = 0; i < iter_vars.size(); ++i) env_[pointer(iter_vars[i], at.iter_var)] = {-1, values[i]};
      block(of);
    } else {
      auto space = std::make_shared<Space>(extents_);
      std::vector<Form> slots;
      for (size_t i = 0; i < values.size(); ++i) slots.push_back(read(values[i], *space));
      if (init_body != nullptr) leaf(init_body, slots, space, true, true);
      leaf(body, slots, space, false, init_body != nullptr);
    }
    if (conditional) conditions_.pop_back();
  }

  void plain(const Object* stmt) {
    leaf(analyse(stmt, {}, {}, false), {}, std::make_shared<Space>(extents_), false, false);
  }

  std::shared_ptr<Body> analyse(const Object* stmt, std::vector<const Object*> variables, std::vector<int64_t> domain,
                                bool is_init) {
    Analyser analyser(std::move(variables));
    analyser.add(stmt);
    auto body = std::make_shared<Body>(analyser.body(std::move(domain), is_init));
    for (const Object* buffer : body->objects) number(buffer);
    return body;
  }

  // Leaves

  void leaf(const std::shared_ptr<Body>& body, std::vector<Form> slots, const std::shared_ptr<Space>& space,
            bool is_init, bool guarded) {
    while (slots.size() < body->slot_vars.size()) slots.push_back(read(body->slot_vars[slots.size()], *space));
    auto loops_of = [&](Set of_slots) {
      Set loops = 0;
      for (size_t slot = 0; slot < slots.size(); ++slot)
        if (has(of_slots, static_cast<int64_t>(slot))) loops |= space->loops_of(slots[slot]);
      return loops;
    };
    Leaf out{};
    Set outputs = is_init || body->reduces ? loops_of(body->store_slots) : 0;
    for (int depth = 0; depth < static_cast<int>(chain_.size()); ++depth) {
      if (!is_init || has(outputs, depth)) out.kept.push_back(depth);
      if (!is_init && body->reduces && !has(outputs, depth)) out.reduction |= bit(depth);
    }
    out.branch = loops_of(body->branch_slots);
    out.special = loops_of(body->special_slots);
    for (const Object* condition : conditions_) out.branch |= space->loops_of(read(condition, *space));
    for (int depth = 0; depth < 64; ++depth) {
      if (!has(out.branch, depth)) continue;
      Loop& loop = out_.loops[static_cast<size_t>(chain_.at(static_cast<size_t>(depth)))];
      loop.scalarised |= loop.kind == kVectorized;
    }
    ++position_;
    if (chain_.empty()) ++nest_;
    out.body = body;
    out.chain = chain_;
    out.space = space;
    out.slots = std::move(slots);
    for (const Object* buffer : body->objects) out.buffers.push_back(number(buffer));
    out.position = position_;
    out.predicated = !conditions_.empty();
    out.is_init = is_init;
    out.guarded = guarded;
    out.nest = nest_;
    out_.leaves.push_back(std::move(out));
  }

  int number(const Object* buffer) { return buffers_.emplace(buffer, static_cast<int>(buffers_.size())).first->second; }

  void allocate(const Object* buffer) { allocated_.push_back(number(buffer)); }

  /// Decide like TVM's UnrollLoop pass (src/s_tir/transform/unroll_loop.cc): a serial loop is unrolled if all loops in it
  /// are, and the unrolled loop has at most `max_step` stores. Counts saturate at a bound that no `max_step` reaches.
  void mark_unrolled() {
    constexpr int64_t bound = int64_t{1} << 62;
    auto product = [](int64_t a, int64_t b) { return b != 0 && a > bound / b ? bound : a * b; };
    std::vector<Loop>& all = out_.loops;
    bool any_unrolled = std::any_of(all.begin(), all.end(), [](const Loop& loop) {
      return loop.max_step != 0 || loop.kind == kUnrolled;
    });
    if (!any_unrolled) return;
    std::vector<int64_t> stores(all.size()), deepest(all.size()), normal(all.size());
    for (const Leaf& leaf : out_.leaves)
      if (!leaf.chain.empty()) stores[static_cast<size_t>(leaf.chain.back())] += std::max<int64_t>(1, leaf.body->stores);
    for (size_t i = all.size(); i-- > 0;) {
      Loop& loop = all[i];
      int64_t count = stores[i], deep = deepest[i], other = normal[i];
      if ((loop.kind == kVectorized && !loop.scalarised) || loop.kind == kBlockIdx || loop.kind == kThreadIdx) {
        // not unrolled, and does not prevent unrolling around it
      } else if (loop.kind == kVThread) {
        if (loop.extent < kVThreadUnrolledBelow) count = product(count, loop.extent);
      } else if (loop.kind == kUnrolled ||
                 (loop.kind != kParallel && other == 0 && deep <= kUnrollMaxDepth &&
                  product(count, loop.extent) <= loop.max_step)) {
        loop.unrolled = true;
        count = product(count, loop.extent);
        ++deep;
      } else {
        ++other;
      }
      if (loop.parent < 0) continue;
      auto parent = static_cast<size_t>(loop.parent);
      stores[parent] = std::min(bound, stores[parent] + count);
      deepest[parent] = std::max(deepest[parent], deep);
      normal[parent] = std::max(normal[parent], other);
    }
  }

  /// Fill in the fields of Program that describe buffers.
  void storage() {
    size_t n = buffers_.size();
    out_.shared_prefix.assign(n, -1);
    out_.renewed.assign(n, 0);
    out_.threads_share.assign(n, false);
    if (allocated_.empty()) return;
    std::vector<bool> is_allocated(n, false), seen(n, false);
    for (int number : allocated_) is_allocated[static_cast<size_t>(number)] = true;
    std::vector<std::vector<int>> chains(n);
    std::vector<Scope> scopes(n, kGlobal);
    for (const Leaf& leaf : out_.leaves) {
      for (size_t i = 0; i < leaf.buffers.size(); ++i) {
        auto number = static_cast<size_t>(leaf.buffers[i]);
        if (!is_allocated[number]) continue;
        if (!seen[number]) {
          seen[number] = true;
          chains[number] = leaf.chain;
          scopes[number] = leaf.body->buffers[i].scope;
          continue;
        }
        std::vector<int>& known = chains[number];
        size_t equal = 0;
        while (equal < known.size() && equal < leaf.chain.size() && known[equal] == leaf.chain[equal]) ++equal;
        known.resize(equal);
      }
    }
    for (size_t number = 0; number < n; ++number) {
      if (!seen[number]) continue;
      const std::vector<int>& chain = chains[number];
      int64_t renewed = static_cast<int64_t>(chain.size());
      out_.shared_prefix[number] = renewed;
      if (scopes[number] == kGlobal && axes_seen_) {
        // A buffer in global memory belongs to all threads of a kernel.
        auto bound = [&](int loop) { return out_.loops[static_cast<size_t>(loop)].kind >= kBlockIdx; };
        renewed = std::find_if(chain.begin(), chain.end(), bound) - chain.begin();
      }
      out_.renewed[number] = renewed;
      out_.threads_share[number] = scopes[number] == kShared;
    }
  }

  const Nodes& tvm_ = nodes();
  Program out_;
  std::vector<int> chain_;
  std::vector<int64_t> extents_;
  std::unordered_map<const Object*, Bound> env_;
  std::unordered_map<std::string, int> axes_;  // thread axis -> depth of the loop bound to it
  bool axes_seen_ = false;
  std::vector<const Object*> conditions_;
  std::unordered_map<const Object*, int> buffers_;
  std::vector<int> allocated_;
  int64_t position_ = 0, nest_ = -1, max_step_ = 0, explicit_unroll_ = 1;
};

}  // namespace cdmpp
