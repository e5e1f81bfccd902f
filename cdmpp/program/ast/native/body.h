// What one computation does, apart from the loops around it: operations and buffer accesses.
//
// The body of a block is analysed in terms of its slots: its own iteration variables and the other variables of the program
// that occur in it.
#pragma once

#include "affine.h"

namespace cdmpp {

/// Kinds of operations, in the order of OP_KINDS in schema.py.
enum Operation : int {
  kFAdd, kFMul, kFma, kFDiv, kFMinMax, kExp, kTanh, kErf, kTranscendental, kSqrt, kCastOp, kCompare, kSelectOp,
  kBranch, kIAdd, kIMul, kIDivMod, kCallOp, kOperations,
};
inline constexpr const char* kOperationNames =
    "fadd fmul fma fdiv fminmax exp tanh erf transcendental sqrt cast compare select branch iadd imul idivmod call";

/// The operation that a call counts as, by the last part of the callee's name; all others count as "call".
inline const std::unordered_map<std::string_view, Operation> kCalls = {
    {"exp", kExp}, {"exp2", kExp}, {"exp10", kExp}, {"sigmoid", kExp}, {"tanh", kTanh}, {"erf", kErf}, {"sqrt", kSqrt},
    {"rsqrt", kSqrt}, {"log", kTranscendental}, {"log2", kTranscendental}, {"log10", kTranscendental},
    {"log1p", kTranscendental}, {"pow", kTranscendental}, {"sin", kTranscendental}, {"cos", kTranscendental},
    {"tan", kTranscendental}, {"atan", kTranscendental}, {"sinh", kTranscendental}, {"cosh", kTranscendental},
    {"fma", kFma}, {"if_then_else", kBranch}, {"floor", kFMinMax}, {"ceil", kFMinMax}, {"round", kFMinMax},
    {"trunc", kFMinMax}, {"nearbyint", kFMinMax}, {"fabs", kFMinMax}, {"abs", kFMinMax}, {"clz", kIAdd},
    {"popcount", kIAdd}, {"shift_left", kIAdd}, {"shift_right", kIAdd}, {"bitwise_and", kIAdd}, {"bitwise_or", kIAdd},
    {"bitwise_xor", kIAdd}, {"bitwise_not", kIAdd},
};

/// Memory that holds a buffer. A scope that is neither global nor shared counts as local: it belongs to one thread.
enum Scope : int { kGlobal, kShared, kLocal };

/// An index expression over slots: a constant, a sum of terms, or, if it is not affine, an operator with its operands.
struct Tree {
  enum Shape : char { kNumber = 'n', kLinear = 'l', kSum = '+', kProduct = '*', kQuotient = '/', kRemainder = '%', kAny = '?' };
  Shape shape = kNumber;
  int64_t value = 0;
  Terms terms;
  std::vector<Tree> parts;

  Tree() = default;
  Tree(int64_t number) : value(number) {}
  Tree(Shape of, std::vector<Tree> operands) : shape(of), parts(std::move(operands)) {}
  static Tree of(const Form& form) {
    Tree out;
    out.shape = form.constant ? kNumber : kLinear;
    out.value = form.value;
    out.terms = form.terms;
    return out;
  }
  bool is_number() const { return shape == kNumber; }
  bool is_linear() const { return shape == kLinear; }
  bool has_parts() const { return !is_number() && !is_linear(); }
  Form form() const { return is_number() ? Form(value) : Form(terms); }
};

inline bool same(const Tree& a, const Tree& b) {
  if (a.shape != b.shape) return false;
  if (a.is_number()) return a.value == b.value;
  if (a.is_linear()) return same(a.terms, b.terms);
  if (a.parts.size() != b.parts.size()) return false;
  for (size_t i = 0; i < a.parts.size(); ++i)
    if (!same(a.parts[i], b.parts[i])) return false;
  return true;
}

/// The slots that an index expression depends on.
inline Set slots_of(const Tree& tree) {
  Set out = 0;
  for (const Term& term : tree.terms) out |= bit(term.key);
  for (const Tree& part : tree.parts) out |= slots_of(part);
  return out;
}

/// Convert an index expression over slots to a form over loops; `slots` holds the form of each slot.
inline Form evaluate(const Tree& tree, const std::vector<Form>& slots, Space& space) {
  if (tree.is_number()) return tree.value;
  if (tree.is_linear()) {
    auto slot = [&](const Term& term) { return scale(slots[static_cast<size_t>(term.key)], term.coef); };
    if (tree.terms.size() == 1) return slot(tree.terms[0]);
    Form total = 0;
    for (const Term& term : tree.terms) total = space.sum(total, slot(term));
    return total;
  }
  std::vector<Form> parts;
  for (const Tree& part : tree.parts) parts.push_back(evaluate(part, slots, space));
  switch (tree.shape) {
    case Tree::kSum: return space.sum(parts[0], parts[1]);
    case Tree::kProduct: return space.product(parts[0], parts[1]);
    case Tree::kQuotient: return space.floordiv(parts[0], parts[1]);
    case Tree::kRemainder: return space.floormod(parts[0], parts[1]);
    default: break;
  }
  Set loops = 0;
  for (const Form& part : parts) loops |= space.loops_of(part);
  return space.opaque(loops);
}

struct BufferInfo {
  std::vector<int64_t> shape;
  double itemsize;
  Scope scope;
};

/// All accesses of one computation to one buffer with the same index.
struct Access {
  size_t buffer;
  std::vector<Tree> index;
  int64_t loads = 0, stores = 0;
  /// When it was first loaded and first stored (a running number; -1: never). The accesses are sorted by these.
  int first_load = -1, first_store = -1;
};

struct Body {
  double ops[kOperations] = {};
  std::vector<Access> accesses;
  std::vector<BufferInfo> buffers;
  std::vector<const Object*> objects;  // TVM's objects of `buffers`
  std::vector<const Object*> slot_vars;
  std::vector<int64_t> domain;
  Set branch_slots = 0, store_slots = 0, special_slots = 0;
  int64_t stores = 0, points = 1;
  double itemsize = 0;
  bool is_float = true, reduces = false, linear = true;

  bool does_anything() const {
    return stores != 0 || std::any_of(ops, ops + kOperations, [](double count) { return count != 0; });
  }
};

/// Operands of an expression whose kind needs no special treatment; nullptr stands for an operand that is not an expression.
/// An object without fields for operands (a reference to a function, a region, ...) has none.
inline std::vector<const Object*> children(const Object* expr) {
  const Nodes& tvm = nodes();
  const Offsets& at = tvm.at;
  Kind kind = tvm.kind(expr);
  if (is_binary(kind)) return {tvm.a(expr), tvm.b(expr)};
  switch (kind) {
    case kFloatImm:
    case kStringImm: return {nullptr};
    case kNot: return {pointer(expr, at.not_a)};
    case kBitwiseNot: return {pointer(expr, at.bitwise_not_a)};
    case kBroadcast: return {pointer(expr, at.broadcast_value)};
    case kRamp: return {pointer(expr, at.ramp_base), pointer(expr, at.ramp_stride)};
    case kLet: return {pointer(expr, at.let_value), pointer(expr, at.let_body)};
    case kSelect:
      return {pointer(expr, at.select_condition), pointer(expr, at.select_true), pointer(expr, at.select_false)};
    case kShuffle:
    case kCall: {
      std::vector<const Object*> out;
      Items operands(pointer(expr, kind == kCall ? at.call_args : at.shuffle_vectors));
      for (size_t i = 0; i < operands.size(); ++i) out.push_back(operands[i]);
      return out;
    }
    default: return {};
  }
}

/// Analyses one straight-line statement.
class Analyser {
 public:
  explicit Analyser(std::vector<const Object*> slot_vars) { body_.slot_vars = std::move(slot_vars); }

  /// Whether a statement contains no loops and no blocks.
  static bool straight(const Object* stmt) {
    const Nodes& tvm = nodes();
    switch (tvm.kind(stmt)) {
      case kBufferStore:
      case kEvaluate:
      case kBind: return true;
      case kSeqStmt: {
        Items parts(pointer(stmt, tvm.at.seq));
        for (size_t i = 0; i < parts.size(); ++i)
          if (!straight(parts[i])) return false;
        return true;
      }
      case kIfThenElse: {
        const Object* otherwise = pointer(stmt, tvm.at.if_else);
        return straight(pointer(stmt, tvm.at.if_then)) && (otherwise == nullptr || straight(otherwise));
      }
      default: return false;
    }
  }

  /// Add a straight-line statement to the body.
  void add(const Object* stmt) {
    const Offsets& at = tvm_.at;
    switch (tvm_.kind(stmt)) {
      case kBufferStore: return store(stmt);
      case kBind:
        lets_[pointer(stmt, at.bind_var)] = pointer(stmt, at.bind_value);
        return;
      case kEvaluate: {
        const Object* value_of = pointer(stmt, at.evaluate_value);
        if (tvm_.kind(value_of) == kCall) {
          body_.ops[kCallOp] += 1;
          for (const Object* arg : children(value_of)) value(arg);
        }
        return;
      }
      case kSeqStmt: {
        Items parts(pointer(stmt, at.seq));
        for (size_t i = 0; i < parts.size(); ++i) add(parts[i]);
        return;
      }
      case kIfThenElse: {
        const Object* condition = pointer(stmt, at.if_condition);
        body_.branch_slots |= slots_of(tree(condition));
        value(condition);
        add(pointer(stmt, at.if_then));
        if (const Object* otherwise = pointer(stmt, at.if_else)) add(otherwise);
        return;
      }
      default: return;  // `straight` accepts no other kind
    }
  }

  /// The body that consists of all added statements.
  Body body(std::vector<int64_t> domain, bool is_init) {
    Body& out = body_;
    std::stable_sort(out.accesses.begin(), out.accesses.end(), [](const Access& a, const Access& b) {
      if ((a.first_store >= 0) != (b.first_store >= 0)) return a.first_store >= 0;
      return a.first_store >= 0 ? a.first_store < b.first_store : a.first_load < b.first_load;
    });
    for (const Access& access : out.accesses) {
      for (const Tree& index : access.index) {
        if (access.stores) out.store_slots |= slots_of(index);
        out.linear &= !index.has_parts();
      }
      out.stores += access.stores;
      out.reduces |= access.stores && access.loads;
    }
    for (size_t slot = 0; slot < domain.size(); ++slot)
      if (!is_init || has(out.store_slots, static_cast<int64_t>(slot))) out.points = times(out.points, domain[slot]);
    out.domain = std::move(domain);
    return std::move(out);
  }

 private:
  void store(const Object* stmt) {
    const Object* buffer = pointer(stmt, tvm_.at.store_buffer);
    touch(buffer, pointer(stmt, tvm_.at.store_indices), true);
    if (body_.itemsize == 0) {
      Element element = tvm_.element(pointer(tvm_.buffer_type(buffer), tvm_.at.buffer_dtype));
      body_.itemsize = element.bytes;
      body_.is_float = element.is_float;
    }
    value(pointer(stmt, tvm_.at.store_value));
  }

  /// Count the operations and accesses of an expression.
  void value(const Object* expr) {
    if (expr == nullptr) return;
    const Offsets& at = tvm_.at;
    Kind kind = tvm_.kind(expr);
    if (is_binary(kind)) return binary(kind, expr);
    switch (kind) {
      case kTensorLoad: touch(pointer(expr, at.load_source), pointer(expr, at.load_indices), false); return;
      case kIntImm:
      case kFloatImm:
      case kStringImm: return;
      case kVar: {
        auto found = lets_.find(expr);
        if (found == lets_.end()) {
          if (special_depth_) body_.special_slots |= slots_of(tree(expr));
          return;
        }
        const Object* bound = found->second;
        lets_.erase(found);
        return value(bound);
      }
      case kCall: return call(expr);
      case kCast:
        body_.ops[kCastOp] += 1;
        return value(pointer(expr, at.cast_value));
      case kSelect: body_.ops[kSelectOp] += 1; break;
      case kNot: body_.ops[kIAdd] += 1; break;
      case kLet:
        lets_[pointer(expr, at.let_var)] = pointer(expr, at.let_value);
        return value(pointer(expr, at.let_body));
      default: break;
    }
    for (const Object* part : children(expr)) value(part);
  }

  void binary(Kind kind, const Object* expr) {
    const Object *a = tvm_.a(expr), *b = tvm_.b(expr);
    Operation operation = is_compare(kind) ? kCompare : is_division(kind) ? kIDivMod : kind == kMul ? kIMul : kIAdd;
    if ((kind <= kDiv || kind == kMin || kind == kMax) && tvm_.element(pointer(expr, tvm_.at.expr_ty)).is_float) {
      if (kind == kAdd || kind == kSub) {
        operation = kFAdd;
        if (tvm_.kind(a) == kMul || tvm_.kind(b) == kMul) {
          operation = kFma;
          body_.ops[kFMul] -= 1;
        }
      } else {
        operation = kind == kMul ? kFMul : kind == kDiv ? kFDiv : kFMinMax;
      }
    }
    body_.ops[operation] += 1;
    value(a);
    value(b);
  }

  void call(const Object* expr) {
    const Object* op = pointer(expr, tvm_.at.call_op);
    std::string_view name;  // stays empty for a function of the module
    if (tvm_.kind(op) == kOp) name = text(any(op, tvm_.at.op_name));
    name = name.substr(name.rfind('.') + 1);
    auto found = kCalls.find(name);
    Operation operation = found == kCalls.end() ? kCallOp : found->second;
    body_.ops[operation] += 1;
    std::vector<const Object*> args = children(expr);
    if (name == "sigmoid") {
      body_.ops[kFDiv] += 1;
      body_.ops[kFAdd] += 1;
    } else if (name == "if_then_else") {
      body_.branch_slots |= slots_of(tree(args.at(0)));
    }
    bool is_special = operation >= kExp && operation <= kSqrt;
    special_depth_ += is_special;
    for (const Object* arg : args) value(arg);
    special_depth_ -= is_special;
  }

  void touch(const Object* buffer, const Object* indices, bool is_store) {
    size_t number = 0;
    while (number < body_.objects.size() && body_.objects[number] != buffer) ++number;
    if (number == body_.objects.size()) {
      body_.buffers.push_back(info(buffer));
      body_.objects.push_back(buffer);
    }
    std::vector<Tree> trees;
    Items items(indices);
    for (size_t i = 0; i < items.size(); ++i) {
      trees.push_back(tree(items[i]));
      if (special_depth_) body_.special_slots |= slots_of(trees.back());
    }
    Access* access = nullptr;
    for (Access& known : body_.accesses) {
      if (known.buffer != number || known.index.size() != trees.size()) continue;
      bool equal = true;
      for (size_t i = 0; equal && i < trees.size(); ++i) equal = same(known.index[i], trees[i]);
      if (equal) {
        access = &known;
        break;
      }
    }
    if (access == nullptr) {
      if (trees.size() != body_.buffers[number].shape.size())
        throw ProgramError("a buffer has more or fewer indices than dimensions");
      body_.accesses.emplace_back();
      access = &body_.accesses.back();
      access->buffer = number;
    }
    access->index = std::move(trees);
    int& first = is_store ? access->first_store : access->first_load;
    if (first < 0) first = touched_++;
    (is_store ? access->stores : access->loads) += 1;
  }

  BufferInfo info(const Object* buffer) const {
    const Object* type = tvm_.buffer_type(buffer);
    BufferInfo out;
    Items shape(pointer(type, tvm_.at.buffer_shape));
    for (size_t i = 0; i < shape.size(); ++i) {
      out.shape.push_back(tvm_.constant(shape[i], "buffer", any(buffer, tvm_.at.var_name)));
    }
    std::string_view scope = text(any(type, tvm_.at.buffer_scope));
    out.scope = starts_with(scope, "shared") ? kShared : scope.empty() || scope == "global" ? kGlobal : kLocal;
    out.itemsize = tvm_.element(pointer(type, tvm_.at.buffer_dtype)).bytes;
    return out;
  }

  /// Convert a TIR expression to an index expression over slots.
  Tree tree(const Object* expr) {
    if (expr == nullptr) return Tree(Tree::kAny, {});
    const Offsets& at = tvm_.at;
    Kind kind = tvm_.kind(expr);
    if (is_binary(kind)) {
      Tree a = tree(tvm_.a(expr));
      Tree b = tree(tvm_.b(expr));
      return combined(kind, std::move(a), std::move(b));
    }
    switch (kind) {
      case kIntImm: return Tree(tvm_.int_value(expr));
      case kCast: return tree(pointer(expr, at.cast_value));
      case kVar: {
        auto bound = lets_.find(expr);
        if (bound != lets_.end()) return tree(bound->second);
        size_t slot = 0;
        while (slot < body_.slot_vars.size() && body_.slot_vars[slot] != expr) ++slot;
        if (slot == body_.slot_vars.size()) body_.slot_vars.push_back(expr);
        return Tree::of(Form(Terms{{static_cast<int64_t>(slot), 1}}));
      }
      case kTensorLoad: {
        const Object* indices = pointer(expr, at.load_indices);
        touch(pointer(expr, at.load_source), indices, false);
        Items items(indices);
        std::vector<Tree> parts;
        for (size_t i = 0; i < items.size(); ++i) parts.push_back(tree(items[i]));
        return Tree(Tree::kAny, std::move(parts));
      }
      default: {
        std::vector<Tree> parts;
        for (const Object* part : children(expr)) parts.push_back(tree(part));
        return Tree(Tree::kAny, std::move(parts));
      }
    }
  }

  static Tree combined(Kind kind, Tree a, Tree b) {
    auto both = [&](Tree::Shape shape) {
      std::vector<Tree> parts;
      parts.push_back(std::move(a));
      parts.push_back(std::move(b));
      return Tree(shape, std::move(parts));
    };
    if (a.shape == Tree::kAny || b.shape == Tree::kAny) return both(Tree::kAny);
    if (kind == kAdd || kind == kSub) {
      if (kind == kSub) b = b.has_parts() ? Tree(Tree::kProduct, {std::move(b), Tree(-1)}) : Tree::of(scale(b.form(), -1));
      return a.has_parts() || b.has_parts() ? both(Tree::kSum) : Tree::of(cdmpp::add(a.form(), b.form()));
    }
    if (kind == kMul) {
      if (b.is_number() && !a.has_parts()) return Tree::of(scale(a.form(), b.value));
      if (a.is_number() && !b.has_parts()) return Tree::of(scale(b.form(), a.value));
      return both(Tree::kProduct);
    }
    if (is_division(kind)) {
      if (a.is_number() && b.is_number() && b.value != 0)
        return Tree(kind == kFloorMod ? floor_mod(a.value, b.value) : floor_div(a.value, b.value));
      return both(kind == kFloorMod || kind == kMod ? Tree::kRemainder : Tree::kQuotient);
    }
    if ((kind == kMax || kind == kMin) && (a.is_number() || b.is_number())) return a.is_number() ? b : a;  // clamping
    return both(Tree::kAny);
  }

  const Nodes& tvm_ = nodes();
  Body body_;
  std::unordered_map<const Object*, const Object*> lets_;
  int touched_ = 0;
  int special_depth_ = 0;  // number of special calls around the current expression
};

}  // namespace cdmpp
