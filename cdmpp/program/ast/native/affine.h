// Index expressions as linear forms of the loops around them.
//
// A Form is either a constant or a sum of terms. A term is a loop or an atom with its coefficient. A sum has no constant part:
// footprints and strides do not depend on it, so it is dropped. Loops are numbered 0, 1, ... from the outermost loop of the
// leaf's own chain. A subexpression that is not affine, mostly a floordiv or floormod of fused loops, becomes an atom, numbered
// -1, -2, ..., after all exact simplifications: the splits that MetaSchedule makes of fused loops mostly cancel.
//
// If several simplifications are possible, the order of terms and the numbers of atoms decide which is found first, so another
// order gives other features.
#pragma once

#include <algorithm>
#include <deque>
#include <numeric>
#include <utility>

#include "nodes.h"

namespace cdmpp {

[[noreturn]] inline void too_large() {
  throw ProgramError("an index or a number of elements of the program does not fit into 64 bits");
}

inline int64_t plus(int64_t a, int64_t b) {
  int64_t out;
  if (__builtin_add_overflow(a, b, &out)) too_large();
  return out;
}

inline int64_t minus(int64_t a, int64_t b) {
  int64_t out;
  if (__builtin_sub_overflow(a, b, &out)) too_large();
  return out;
}

inline int64_t times(int64_t a, int64_t b) {
  int64_t out;
  if (__builtin_mul_overflow(a, b, &out)) too_large();
  return out;
}

inline int64_t magnitude(int64_t a) { return a < 0 ? minus(0, a) : a; }

/// a // b as in TIR and Python: rounds down.
inline int64_t floor_div(int64_t a, int64_t b) {
  if (b == -1) return minus(0, a);
  int64_t quotient = a / b;
  return quotient - ((a % b != 0) && ((a < 0) != (b < 0)));
}

/// a % b as in TIR and Python: the result has the sign of b.
inline int64_t floor_mod(int64_t a, int64_t b) {
  if (b == -1) return 0;
  int64_t remainder = a % b;
  return remainder != 0 && ((remainder < 0) != (b < 0)) ? remainder + b : remainder;
}

/// A set of loops, given by depth, or of slots: bit i is set if i is in the set.
using Set = uint64_t;

inline Set bit(int64_t i) {
  if (i < 0 || i >= 64) throw ProgramError("a computation of the program has over 64 loops or variables");
  return Set{1} << i;
}

inline bool has(Set set, int64_t i) { return i >= 0 && i < 64 && (set >> i & 1); }

/// A coefficient and its key: a loop (>= 0) or an atom (< 0), or, in a Tree, a slot.
struct Term {
  int64_t key;
  int64_t coef;
};

/// Terms with distinct keys, in the order in which the keys first occurred.
using Terms = std::vector<Term>;

inline const Term* find(const Terms& terms, int64_t key) {
  for (const Term& term : terms)
    if (term.key == key) return &term;
  return nullptr;
}

inline Term* find(Terms& terms, int64_t key) { return const_cast<Term*>(find(std::as_const(terms), key)); }

/// Add `coef` to the term with the given key; the term is created if it does not exist.
inline void count(Terms& terms, int64_t key, int64_t coef) {
  if (Term* term = find(terms, key)) {
    term->coef = plus(term->coef, coef);
  } else {
    terms.push_back({key, coef});
  }
}

/// Whether both have the same terms, in any order.
inline bool same(const Terms& a, const Terms& b) {
  if (a.size() != b.size()) return false;
  for (const Term& term : a) {
    const Term* other = find(b, term.key);
    if (other == nullptr || other->coef != term.coef) return false;
  }
  return true;
}

/// Either a constant or a sum of terms.
struct Form {
  bool constant = true;
  int64_t value = 0;
  Terms terms;

  Form() = default;
  Form(int64_t number) : value(number) {}
  Form(Terms of) : constant(false), terms(std::move(of)) {}
};

inline Form add(const Form& a, const Form& b) {
  if (a.constant) return b.constant ? Form(plus(a.value, b.value)) : b;
  if (b.constant) return a;
  Terms out = a.terms;
  for (const Term& term : b.terms) {
    Term* own = find(out, term.key);
    int64_t total = own ? plus(own->coef, term.coef) : term.coef;
    if (total == 0) {
      if (own) out.erase(out.begin() + (own - out.data()));
    } else if (own) {
      own->coef = total;
    } else {
      out.push_back(term);
    }
  }
  return out.empty() ? Form(0) : Form(std::move(out));
}

inline Form scale(const Form& a, int64_t factor) {
  if (a.constant) return times(a.value, factor);
  if (factor == 1) return a;
  if (factor == 0) return 0;
  Terms out = a.terms;
  for (Term& term : out) term.coef = times(term.coef, factor);
  return out;
}

enum Op : uint8_t { kDivide, kRemain, kOpaque };

/// A part of an index that is not affine in the loops: floor(source / factor), source mod factor, or an unknown function of
/// the loops in `source` (a value read from memory, a product of loops, ...).
struct Atom {
  Op op;
  Terms source;
  int64_t factor;
  int64_t span;  // largest minus smallest value over the whole loop nest
  Set loops;
};

/// The loops around one leaf, and the atoms of its indices.
class Space {
 public:
  explicit Space(std::vector<int64_t> of) : extents(std::move(of)) {}

  std::vector<int64_t> extents;
  std::deque<Atom> atoms;  // a deque, so that its elements never move in memory

  const Atom& atom(int64_t key) const { return atoms[static_cast<size_t>(-1 - key)]; }

  Set loops_of(const Form& form) const {
    Set loops = 0;
    if (!form.constant)
      for (const Term& term : form.terms) loops |= term.key >= 0 ? bit(term.key) : atom(term.key).loops;
    return loops;
  }

  /// a + b, simplified: k * (s // k) + s % k becomes s.
  Form sum(const Form& a, const Form& b) const {
    Form out = add(a, b);
    return atoms.size() > 1 && !out.constant ? joined(std::move(out)) : out;
  }

  Form product(const Form& a, const Form& b) {
    if (b.constant) return scale(a, b.value);
    if (a.constant) return scale(b, a.value);
    return opaque(loops_of(a) | loops_of(b));
  }

  Form floordiv(const Form& a, const Form& b) {
    if (!b.constant || b.value <= 0) return opaque(loops_of(a) | loops_of(b));
    return a.constant ? Form(floor_div(a.value, b.value)) : split(a.terms, b.value).first;
  }

  Form floormod(const Form& a, const Form& b) {
    if (!b.constant || b.value <= 0) return opaque(loops_of(a) | loops_of(b));
    return a.constant ? Form(floor_mod(a.value, b.value)) : split(a.terms, b.value).second;
  }

  /// An unknown function of the given loops.
  Form opaque(Set loops) {
    if (loops == 0) return 0;
    Terms source;
    int64_t points = 1;
    for (int loop = 0; loop < 64; ++loop) {
      if (!has(loops, loop)) continue;
      source.push_back({loop, 1});
      points = times(points, extents[static_cast<size_t>(loop)]);
    }
    return Terms{{number(kOpaque, source, 0, points - 1), 1}};
  }

  /// Quotient and remainder of a form by a positive constant.
  std::pair<Form, Form> split(const Terms& form, int64_t factor) {
    if (factor == 1) return {Form(form), Form(0)};
    struct Part {
      int64_t size, key, coef, span;
    };
    Terms whole;
    std::vector<Part> parts;
    int64_t rest_span = 0;
    for (const Term& term : form) {
      if (floor_mod(term.coef, factor) == 0) {
        whole.push_back({term.key, floor_div(term.coef, factor)});
        continue;
      }
      int64_t span = term.coef > 0 ? times(term.coef, span_of(term.key)) : factor;
      parts.push_back({magnitude(term.coef), term.key, term.coef, span});
      rest_span = plus(rest_span, span);
    }
    if (parts.empty()) return {Form(std::move(whole)), Form(0)};
    if (rest_span < factor) {
      Terms low;
      for (const Part& part : parts) low.push_back({part.key, part.coef});
      return {whole.empty() ? Form(0) : Form(std::move(whole)), Form(std::move(low))};
    }
    std::sort(parts.begin(), parts.end(), [](const Part& a, const Part& b) {
      return a.size != b.size ? a.size > b.size : a.key > b.key;
    });
    int64_t g = factor;
    size_t cut = 0;
    while (rest_span >= g && cut < parts.size()) {
      g = std::gcd(g, parts[cut].coef);
      rest_span = minus(rest_span, parts[cut].span);
      ++cut;
    }
    Terms low, high;
    for (size_t i = cut; i < parts.size(); ++i) low.push_back({parts[i].key, parts[i].coef});
    for (size_t i = 0; i < cut; ++i) high.push_back({parts[i].key, parts[i].coef / g});
    auto [quotient, remainder] = split_high(high, factor / g);
    if (g > 1) remainder = scale(remainder, g);
    return {whole.empty() ? quotient : sum(Form(std::move(whole)), quotient),
            low.empty() ? remainder : sum(remainder, Form(std::move(low)))};
  }

  /// The form with each matching quotient and remainder merged: k * (s // k) + s % k becomes s.
  Form joined(Form form) const {
    while (true) {
      auto is_atom = [](const Term& term) { return term.key < 0; };
      if (std::count_if(form.terms.begin(), form.terms.end(), is_atom) < 2) return form;
      int64_t remainder, quotient;
      if (!pair(form.terms, &remainder, &quotient)) return form;
      int64_t coef = find(form.terms, remainder)->coef;
      Terms rest;
      for (const Term& term : form.terms)
        if (term.key != remainder && term.key != quotient) rest.push_back(term);
      form = add(Form(std::move(rest)), scale(Form(atom(quotient).source), coef));
      if (form.constant) return form;
    }
  }

  /// Span of an atom (largest minus smallest value) while only the first k loops of `order` vary, for k = 0 ... len(order).
  /// A loop given as -1 in `order` changes nothing. `known` caches the results by atom for this order.
  const std::vector<int64_t>& spans_by_depth(int64_t key, const std::vector<int>& order,
                                             std::unordered_map<int64_t, std::vector<int64_t>>& known) const {
    auto it = known.find(key);
    if (it != known.end()) return it->second;
    const Atom& of = atom(key);
    std::vector<int64_t> out(order.size() + 1, 0);
    if (of.op == kOpaque) {
      int64_t points = 1;
      for (size_t k = 0; k < order.size(); ++k) {
        if (has(of.loops, order[k])) points = times(points, extents[static_cast<size_t>(order[k])]);
        out[k + 1] = points - 1;
      }
    } else {
      std::vector<int64_t> spans(order.size() + 1, 0);
      for (const Term& term : of.source) {
        if (term.key >= 0) continue;
        const std::vector<int64_t>& inner = spans_by_depth(term.key, order, known);
        for (size_t k = 1; k < spans.size(); ++k) spans[k] = plus(spans[k], times(magnitude(term.coef), inner[k]));
      }
      int64_t total = 0;
      for (size_t k = 1; k < spans.size(); ++k) {
        int loop = order[k - 1];
        const Term* term = loop >= 0 ? find(of.source, loop) : nullptr;
        if (term) total = plus(total, times(magnitude(term->coef), extents[static_cast<size_t>(loop)] - 1));
        int64_t span = plus(total, spans[k]);
        out[k] = of.op == kDivide ? floor_div(span, of.factor) : std::min(span, of.factor - 1);
      }
    }
    return known.emplace(key, std::move(out)).first->second;
  }

  /// Change of a form when the given loop goes from 0 to 1 and all others stay at 0.
  int64_t step(const Terms& form, int64_t loop) const {
    int64_t total = 0;
    for (const Term& term : form) {
      if (term.key >= 0) {
        if (term.key == loop) total = plus(total, term.coef);
        continue;
      }
      const Atom& of = atom(term.key);
      int64_t inner = step(of.source, loop);
      if (inner == 0) continue;
      if (of.op == kDivide) inner = floor_div(inner, of.factor);
      if (of.op == kRemain) inner = floor_mod(inner, of.factor);
      total = plus(total, times(term.coef, inner));
    }
    return total;
  }

 private:
  int64_t span_of(int64_t key) const {
    return key >= 0 ? extents[static_cast<size_t>(key)] - 1 : atom(key).span;
  }

  std::pair<Form, Form> split_high(const Terms& high, int64_t factor) {
    if (factor == 1) return {Form(high), Form(0)};
    int64_t span = 0;
    bool positive = true;
    for (const Term& term : high) {
      positive &= term.coef > 0;
      span = plus(span, times(magnitude(term.coef), span_of(term.key)));
    }
    if (positive && span < factor) return {Form(0), Form(high)};
    if (high.size() == 1 && high[0].key < 0 && high[0].coef == 1) {
      const Atom& of = atom(high[0].key);
      if (of.op == kDivide) {
        Form quotient = floordiv(Form(of.source), Form(times(of.factor, factor)));
        return {quotient, Form(Terms{{number(kRemain, high, factor, std::min(span, factor - 1)), 1}})};
      }
      if (of.op == kRemain && of.factor % factor == 0) {
        Form remainder = floormod(Form(of.source), Form(factor));
        return {Form(Terms{{number(kDivide, high, factor, floor_div(span, factor)), 1}}), remainder};
      }
    }
    int64_t quotient = number(kDivide, high, factor, floor_div(span, factor));
    int64_t remainder = number(kRemain, high, factor, std::min(span, factor - 1));
    return {Form(Terms{{quotient, 1}}), Form(Terms{{remainder, 1}})};
  }

  /// Number of the atom with these properties; the atom is created if no equal one exists.
  int64_t number(Op op, const Terms& source, int64_t factor, int64_t span) {
    for (size_t i = 0; i < atoms.size(); ++i)
      if (atoms[i].op == op && atoms[i].factor == factor && same(atoms[i].source, source))
        return -1 - static_cast<int64_t>(i);
    Set loops = loops_of(Form(source));
    atoms.push_back({op, source, factor, span, loops});
    return -static_cast<int64_t>(atoms.size());
  }

  /// Find a remainder and a quotient among the atoms of a form that can be merged; false if there are none.
  bool pair(const Terms& form, int64_t* remainder, int64_t* quotient) const {
    for (const Term& r : form) {
      if (r.key >= 0 || atom(r.key).op != kRemain) continue;
      const Atom& mod = atom(r.key);
      int64_t coef = times(r.coef, mod.factor);
      for (const Term& q : form) {
        if (q.key >= 0 || atom(q.key).op != kDivide || atom(q.key).factor != mod.factor || q.coef != coef) continue;
        const Terms& source = atom(q.key).source;
        bool fits = same(source, mod.source);
        if (!fits && source.size() == 1 && source[0].key < 0 && source[0].coef == 1) {
          const Atom& inner = atom(source[0].key);
          fits = inner.op == kRemain && same(inner.source, mod.source) && inner.factor % mod.factor == 0;
        }
        if (fits) {
          *remainder = r.key;
          *quotient = q.key;
          return true;
        }
      }
    }
    return false;
  }
};

}  // namespace cdmpp
