// PTX text to Program.
#include <algorithm>
#include <cctype>
#include <cstring>
#include <sstream>

#include "program.h"

namespace emulator {
namespace {

struct TypeName {
  const char* name;
  Type type;
  int bits;
};

constexpr TypeName kTypes[] = {
    {"pred", Type::pred, 1},      {"b8", Type::b8, 8},         {"b16", Type::b16, 16},
    {"b32", Type::b32, 32},       {"b64", Type::b64, 64},      {"b128", Type::b128, 128},
    {"u8", Type::u8, 8},          {"u16", Type::u16, 16},      {"u32", Type::u32, 32},
    {"u64", Type::u64, 64},       {"s8", Type::s8, 8},         {"s16", Type::s16, 16},
    {"s32", Type::s32, 32},       {"s64", Type::s64, 64},      {"f16", Type::f16, 16},
    {"bf16", Type::bf16, 16},     {"tf32", Type::tf32, 32},    {"f32", Type::f32, 32},
    {"f64", Type::f64, 64},       {"f16x2", Type::f16x2, 32},  {"bf16x2", Type::bf16x2, 32},
    {"f32x2", Type::f32x2, 64},   {"u16x2", Type::u16x2, 32},  {"s16x2", Type::s16x2, 32},
};

std::string strip(const std::string& text) {
  const size_t begin = text.find_first_not_of(" \t\n");
  if (begin == std::string::npos) return "";
  return text.substr(begin, text.find_last_not_of(" \t\n") - begin + 1);
}

std::vector<std::string> split(const std::string& text, char at) {
  std::vector<std::string> parts;
  std::string part;
  int depth = 0;
  for (char c : text) {
    if (c == '{' || c == '[' || c == '(') ++depth;
    if (c == '}' || c == ']' || c == ')') --depth;
    if (c == at && depth == 0) {
      parts.push_back(strip(part));
      part.clear();
    } else {
      part += c;
    }
  }
  if (!strip(part).empty()) parts.push_back(strip(part));
  return parts;
}

// The names of a scope { ... } and, in `outer`, those around it.
struct Scope {
  std::map<std::string, std::string> names;
};

class Parser {
 public:
  Parser(const std::string& text, const std::string& entry) : entry_(entry) {
    std::istringstream stream(text);
    for (std::string line; std::getline(stream, line);) program_.lines.push_back(line);
  }

  Program run() {
    read_directives();
    read_body();
    resolve();
    return std::move(program_);
  }

 private:
  [[noreturn]] void fail(const std::string& what) const {
    throw std::runtime_error("PTX line " + std::to_string(line_) + ": " + what);
  }

  static std::string code_of(const std::string& line) { return line.substr(0, line.find("//")); }

  // Files, the entry with its parameters, variables in shared memory.
  void read_directives() {
    bool in_parameters = false;
    bool is_other = false;
    for (size_t i = 0; i < program_.lines.size(); ++i) {
      line_ = static_cast<int>(i) + 1;
      const std::string code = strip(code_of(program_.lines[i]));
      const bool is_about_all = code.find(".entry ") != std::string::npos || code.find(".file") == 0;
      if (is_other && !is_about_all) continue;
      std::istringstream words(code);
      std::string word;
      words >> word;
      if (word == ".file") {
        int number = 0;
        words >> number;
        const size_t end = code.rfind('"');
        const size_t begin = code.rfind('"', end - 1);
        std::string path = code.substr(begin + 1, end - begin - 1);
        program_.files[number] = path.substr(path.rfind('/') + 1);
      } else if (word == ".target") {
        words >> program_.target;
      } else if (code.find(".shared ") != std::string::npos && code[0] == '.') {
        declare_shared(code);
      } else if (code.find(".entry ") != std::string::npos) {
        const size_t begin = code.find(".entry ") + 7;
        const std::string name = strip(code.substr(begin, code.find('(') - begin));
        is_other = !entry_.empty() && name != entry_;
        if (is_other) continue;
        if (!program_.name.empty()) fail("a second .entry");
        program_.name = name;
        in_parameters = true;
      } else if (word == ".reqntid" || word == ".maxntid") {
        int product = 1;
        for (const std::string& size : split(code.substr(word.size()), ','))
          product *= std::stoi(size);
        if (word == ".reqntid") program_.threads = product;
      }
      if (in_parameters && code.find(".param") != std::string::npos) declare_parameter(code);
      if (in_parameters && code.find(')') != std::string::npos) in_parameters = false;
      if (!program_.name.empty() && code == "{" && body_ == 0) body_ = static_cast<int>(i);
    }
    if (program_.name.empty()) fail("no .entry " + entry_);
  }

  void declare_shared(const std::string& code) {
    int align = 1;
    std::istringstream words(code);
    std::string name;
    for (std::string word; words >> word;) {
      if (word == ".align") words >> align;
      name = word;
    }
    name = name.substr(0, name.find(';'));
    const size_t bracket = name.find('[');
    int size = 0;
    if (bracket != std::string::npos) {
      const std::string count = name.substr(bracket + 1, name.find(']') - bracket - 1);
      size = count.empty() ? 0 : std::stoi(count);
      name = name.substr(0, bracket);
    } else {
      size = 8;
    }
    const bool is_dynamic = code.find(".extern") == 0;
    if (is_dynamic) {
      dynamic_.push_back(name);
      return;
    }
    program_.static_shared = (program_.static_shared + align - 1) / align * align;
    addresses_[name] = kSharedBase + program_.static_shared;
    program_.static_shared += size;
  }

  void declare_parameter(const std::string& code) {
    Parameter parameter;
    std::istringstream words(code);
    std::string name;
    for (std::string word; words >> word;) {
      if (word == ".align" && name.empty()) {
        int align = 1;
        words >> align;
        parameter.align = std::max(parameter.align, align);
      } else if (word[0] == '.' && word != ".param" && word != ".ptr" && parameter.size == 0) {
        parameter.size = bits_of(type_of(word.substr(1))) / 8;
      } else {
        name = word;
      }
    }
    const size_t bracket = name.find('[');
    if (bracket != std::string::npos) {
      parameter.size = std::stoi(name.substr(bracket + 1));
      name = name.substr(0, bracket);
    }
    while (!name.empty() && (name.back() == ',' || name.back() == ')')) name.pop_back();
    if (parameter.size <= 0) fail("a parameter without a size: " + code);
    if (code.find('[') == std::string::npos) parameter.align = parameter.size;
    const int align = parameter.align;
    parameter.offset = (program_.parameter_bytes + align - 1) / align * align;
    program_.parameter_bytes = parameter.offset + parameter.size;
    addresses_[name] = kParameterBase + parameter.offset;
    program_.parameters.push_back(parameter);
  }

  void read_body() {
    const uint64_t align = 1024;
    for (const std::string& name : dynamic_) {
      const uint64_t end = kSharedBase + program_.static_shared;
      addresses_[name] = program_.static_shared ? (end + align - 1) / align * align : end;
    }
    std::string statement;
    int depth = 0;
    for (size_t i = body_; i < program_.lines.size(); ++i) {
      line_ = static_cast<int>(i) + 1;
      for (const char c : code_of(program_.lines[i]) + "\n") {
        const bool is_start = strip(statement).empty();
        if (c == '{' && is_start) {
          ++depth;
          scopes_.push_back({});
          scope_ids_.push_back(++scope_count_);
        } else if (c == '}' && is_start) {
          scopes_.pop_back();
          scope_ids_.pop_back();
          if (--depth == 0) return;
        } else if (c == ';') {
          add(strip(statement));
          statement.clear();
        } else if (c == '\n' && is_line_directive(strip(statement))) {
          read_location(strip(statement));
          statement.clear();
        } else if (c == '\n' && is_label(strip(statement))) {
          std::string name = strip(statement);
          name.pop_back();
          labels_[declare(name)] = program_.instructions.size();
          statement.clear();
        } else {
          statement += c;
        }
      }
    }
    fail("the body has no end");
  }

  static bool is_line_directive(const std::string& statement) {
    return statement.rfind(".loc", 0) == 0;
  }

  static bool is_label(const std::string& statement) {
    if (statement.size() < 2 || statement.back() != ':') return false;
    return std::all_of(statement.begin(), statement.end() - 1, [](char c) {
      return std::isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '$' || c == '%';
    });
  }

  void read_location(const std::string& statement) {
    std::istringstream words(statement.substr(4));
    words >> file_ >> source_line_;
  }

  // Names that a scope declares are its own; the asm blocks of one function use the same.
  std::string declare(const std::string& name) {
    if (scopes_.size() <= 1) return name;
    const std::string unique = name + "@" + std::to_string(scope_ids_.back());
    scopes_.back().names[name] = unique;
    return unique;
  }

  std::string lookup(const std::string& name) const {
    for (auto scope = scopes_.rbegin(); scope != scopes_.rend(); ++scope) {
      const auto found = scope->names.find(name);
      if (found != scope->names.end()) return found->second;
    }
    return name;
  }

  int register_of(const std::string& name) {
    const auto [entry, is_new] = registers_.emplace(lookup(name), program_.registers);
    if (is_new) ++program_.registers;
    return entry->second;
  }

  void add(std::string statement) {
    if (statement.empty()) return;
    if (statement.rfind(".reg", 0) == 0) {
      if (scopes_.size() > 1) declare_registers(statement);
      return;
    }
    if (statement.rfind(".shared", 0) == 0) return;  // read before
    if (statement.rfind(".pragma", 0) == 0) return;  // a hint to ptxas
    if (statement[0] == '.') fail("an unknown directive: " + statement);
    Instruction at;
    at.line = line_;
    at.source_file = file_;
    at.source_line = source_line_;
    if (statement[0] == '@') {
      const size_t end = statement.find_first_of(" \t");
      std::string name = statement.substr(1, end - 1);
      at.predicate_negated = name[0] == '!';
      if (at.predicate_negated) name = name.substr(1);
      at.predicate = register_of(name);
      statement = strip(statement.substr(end));
    }
    const size_t end = statement.find_first_of(" \t");
    at.opcode = statement.substr(0, end);
    at.words = split(at.opcode, '.');
    for (const std::string& word : at.words) {
      const Type type = type_of(word);
      if (type == Type::none) continue;
      if (at.type != Type::none) at.source = at.type;
      at.type = type;
    }
    at.ftz = at.has("ftz");
    at.sat = at.has("sat");
    if (at.words[0] == "cvt" || at.words[0] == "set") std::swap(at.type, at.source);
    if (at.source == Type::none) at.source = at.type;
    if (end != std::string::npos)
      for (const std::string& text : split(statement.substr(end), ','))
        at.operands.push_back(operand(text));
    at.run = semantics_of(at);
    if (at.run == nullptr) fail("unknown opcode " + at.opcode);
    program_.instructions.push_back(std::move(at));
  }

  void declare_registers(const std::string& statement) {
    const size_t begin = statement.find_first_of(" \t", statement.find('.', 1));
    for (const std::string& name : split(statement.substr(begin), ',')) {
      const size_t range = name.find('<');
      if (range == std::string::npos) {
        declare(name);
        continue;
      }
      const int count = std::stoi(name.substr(range + 1));
      for (int i = 0; i < count; ++i) declare(name.substr(0, range) + std::to_string(i));
    }
  }

  Operand operand(const std::string& text) {
    Operand result;
    if (text == "_") return result;
    if (text[0] == '[') {
      const std::vector<std::string> inside = split(text.substr(1, text.size() - 2), ',');
      result = sum(inside[0]);
      for (size_t i = 1; i < inside.size(); ++i) result.parts.push_back(operand(inside[i]));
      return result;
    }
    if (text[0] == '{') {
      result.kind = Operand::vector;
      for (const std::string& part : split(text.substr(1, text.size() - 2), ','))
        result.parts.push_back(operand(part));
      return result;
    }
    if (text.find('|') != std::string::npos) {
      result.kind = Operand::vector;
      for (const std::string& part : split(text, '|')) result.parts.push_back(operand(part));
      return result;
    }
    if (text[0] == '!') {
      result = operand(strip(text.substr(1)));
      result.negated = true;
      return result;
    }
    return scalar(text);
  }

  // base, base+4 or base + -4
  Operand sum(const std::string& text) {
    Operand result;
    result.kind = Operand::address;
    const size_t plus = text.find('+');
    result.parts.push_back(scalar(strip(text.substr(0, plus))));
    if (plus != std::string::npos)
      result.offset = std::stoll(strip(text.substr(plus + 1)), nullptr, 0);
    return result;
  }

  Operand scalar(const std::string& text) {
    Operand result;
    const std::string digits = text[0] == '-' ? text.substr(1) : text;
    if (std::isdigit(static_cast<unsigned char>(digits[0]))) {
      result.kind = Operand::immediate;
      result.value = number(text, digits);
      return result;
    }
    if (special(text, result)) return result;
    const auto variable = addresses_.find(text);
    if (variable != addresses_.end()) {
      result.kind = Operand::immediate;
      result.value = variable->second;
      return result;
    }
    const std::string name = lookup(text);
    const bool is_declared = name != text;
    if (text[0] == '%' || (is_declared && labels_.count(name) == 0)) {
      result.kind = Operand::reg;
      result.index = register_of(text);
      result.name = text;
      return result;
    }
    result.kind = Operand::label;
    result.name = name;
    // a label of this scope that comes later is not declared yet
    if (!is_declared && scopes_.size() > 1) result.name += "@" + std::to_string(scope_ids_.back());
    return result;
  }

  uint64_t number(const std::string& text, const std::string& digits) {
    if (digits.size() > 2 && digits[0] == '0' && (digits[1] == 'f' || digits[1] == 'F'))
      return std::stoul(digits.substr(2), nullptr, 16);
    if (digits.size() > 2 && digits[0] == '0' && (digits[1] == 'd' || digits[1] == 'D'))
      return std::stoull(digits.substr(2), nullptr, 16);
    const uint64_t value = std::stoull(digits, nullptr, 0);
    return text[0] == '-' ? uint64_t{0} - value : value;
  }

  static bool special(const std::string& text, Operand& result) {
    static const std::map<std::string, Special> kNames = {
        {"%tid", Special::tid},       {"%ntid", Special::ntid},     {"%ctaid", Special::ctaid},
        {"%nctaid", Special::nctaid}, {"%laneid", Special::laneid}, {"%warpid", Special::warpid},
        {"%clock", Special::clock},   {"%clock64", Special::clock},
        {"%envreg1", Special::envreg1}, {"%envreg2", Special::envreg2},
    };
    const size_t dot = text.find('.');
    const auto found = kNames.find(text.substr(0, dot));
    if (found == kNames.end()) return false;
    result.kind = Operand::special;
    result.index = static_cast<int>(found->second);
    if (dot != std::string::npos) result.axis = text[dot + 1] - 'x';
    return true;
  }

  // Labels may be used before they stand.
  void resolve() {
    program_.awaited.assign(program_.registers, 0);
    for (Instruction& at : program_.instructions) {
      for (Operand& operand : at.operands) {
        if (operand.kind == Operand::label) {
          auto found = labels_.find(operand.name);
          if (found == labels_.end())
            found = labels_.find(operand.name.substr(0, operand.name.find('@')));
          if (found == labels_.end()) {
            line_ = at.line;
            fail("an unknown name: " + operand.name);
          }
          operand.value = found->second;
        }
        if (is_awaited(at)) mark(operand);
      }
    }
  }

  void mark(const Operand& operand) {
    if (operand.kind == Operand::reg) program_.awaited[operand.index] = 1;
    for (const Operand& part : operand.parts) mark(part);
  }

  Program program_;
  std::string entry_;
  std::map<std::string, uint64_t> addresses_;
  std::vector<std::string> dynamic_;
  std::map<std::string, size_t> labels_;
  std::map<std::string, int> registers_;
  std::vector<Scope> scopes_;
  std::vector<int> scope_ids_;
  int scope_count_ = 0;
  int body_ = 0;
  int line_ = 0;
  int file_ = 0;
  int source_line_ = 0;
};

}  // namespace

int bits_of(Type type) {
  for (const TypeName& known : kTypes)
    if (known.type == type) return known.bits;
  return 0;
}

Type type_of(const std::string& word) {
  for (const TypeName& known : kTypes)
    if (word == known.name) return known.type;
  return Type::none;
}

bool Instruction::has(const char* word) const {
  return std::find(words.begin(), words.end(), word) != words.end();
}

std::string Program::place(const Instruction& at) const {
  std::string text = name + ", PTX line " + std::to_string(at.line) + " (" +
                     strip(lines[at.line - 1].substr(0, 120)) + ")";
  const auto file = files.find(at.source_file);
  if (file != files.end() && at.source_line != 0)
    text += ", " + file->second + ":" + std::to_string(at.source_line);
  return text;
}

Program parse(const std::string& text, const std::string& entry) {
  return Parser(text, entry).run();
}

}  // namespace emulator
